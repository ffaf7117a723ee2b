// Whatever memory a caller brings and whatever numbers lie in it: nothing is touched that is not
// part of the call, and a NaN or infinity reaches only the rows that see it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/cpu/executor.h"
#include "attention/reference/reference.h"
#include "core/float16.h"
#include "linear/unpack.h"
#include "minference/linear.h"
#include "support/guarded_buffer.h"
#include "support/problem.h"
#include "support/sweep.h"
#include "support/views.h"

namespace minference::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Six heads, so that a mixed index has one head of each form.
Case six_heads(Pattern pattern) {
  Case c;
  c.q_heads = c.kv_heads = 6;
  c.pattern = pattern;
  return c;
}

Stats run_cpu(const AttentionInput& input, const AttentionParams& params,
              const AttentionOutput& output, const SparseIndex* index, IsaLevel level) {
  return attention_cpu(input, params, output, index, level);
}

// ---- memory ----------------------------------------------------------------------------------

// Where in memory a tensor lies.
struct Placement {
  const char* name;
  Fence fence;
  std::int64_t shift = 0;  // elements in front of the first one
  std::int64_t gap = 0;    // elements behind every row, token and sequence
  bool backwards = false;  // tokens in descending order
};

constexpr Placement kAligned = {"aligned, right behind a fence", Fence::kBefore};
constexpr Placement kPlacements[] = {{"up to a fence", Fence::kBehind},
                                     {"one element off", Fence::kBefore, 1},
                                     {"one element off, odd strides", Fence::kBefore, 1, 3},
                                     {"odd strides up to a fence", Fence::kBehind, 0, 5},
                                     {"backwards", Fence::kBehind, 1, 1, true}};

// Memory for a tensor, NaN wherever it has no element yet.
class Placed {
 public:
  Placed(const std::array<std::int64_t, 4>& shape, DType dtype, const Placement& at) {
    const auto [batch, tokens, heads, dim] = shape;
    const std::int64_t head = dim + at.gap;
    const std::int64_t token = heads * head + at.gap;
    const std::int64_t sequence = tokens * token + at.gap;
    view_ = {nullptr, dtype, shape, {sequence, at.backwards ? -token : token, head, 1}};
    const std::int64_t elements =
        (batch - 1) * sequence + (tokens - 1) * token + (heads - 1) * head + dim + at.shift;
    buffer_ = GuardedBuffer(elements * dtype_size(dtype) / 2, at.fence);
    const std::int64_t first = at.shift + (at.backwards ? (tokens - 1) * token : 0);
    view_.data = buffer_.data() + first * dtype_size(dtype) / 2;
  }
  // A copy of a tensor.
  Placed(const TensorView& from, const Placement& at) : Placed(from.shape, from.dtype, at) {
    for_each_row([&](std::int64_t b, std::int64_t t, std::int64_t h) {
      std::memcpy(view_.row(b, t, h), from.row(b, t, h),
                  static_cast<std::size_t>(from.dim() * dtype_size(from.dtype)));
    });
  }

  const TensorView& view() const { return view_; }
  std::vector<float> values() const {
    std::vector<float> result;
    for_each_row([&](std::int64_t b, std::int64_t t, std::int64_t h) {
      for (std::int64_t d = 0; d < view_.dim(); ++d) {
        result.push_back(load_element(view_.row(b, t, h), view_.dtype, d));
      }
    });
    return result;
  }

 private:
  template <class Visit>
  void for_each_row(Visit&& visit) const {
    for (std::int64_t b = 0; b < view_.batch(); ++b) {
      for (std::int64_t t = 0; t < view_.tokens(); ++t) {
        for (std::int64_t h = 0; h < view_.heads(); ++h) visit(b, t, h);
      }
    }
  }

  GuardedBuffer buffer_;
  TensorView view_;
};

// Output, then LSE, of a problem whose tensors all lie as `at` says.
std::vector<float> run_placed(const Problem& problem, DType out_dtype, IsaLevel level,
                              const Placement& at) {
  AttentionInput input = problem.input();
  const Placed q(input.q, at);
  const Placed k(input.k, at);
  const Placed v(input.v, at);
  input.q = q.view();
  input.k = k.view();
  input.v = v.view();
  const auto [batch, tokens, heads, dim] = input.q.shape;
  const Placed out({batch, tokens, heads, input.v.dim()}, out_dtype, at);
  const Placed lse({batch, tokens, heads, 1}, DType::kF32, at);
  attention_cpu(input, problem.params, {out.view(), lse.view()}, problem.index(), level);
  std::vector<float> result = out.values();
  const std::vector<float> sums = lse.values();
  result.insert(result.end(), sums.begin(), sums.end());
  return result;
}

void expect_placement_ignored(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  for (const IsaLevel level : available_isa_levels()) {
    const std::vector<float> expected = run_placed(problem, c.out_dtype, level, kAligned);
    for (const Placement& at : kPlacements) {
      const std::vector<float> actual = run_placed(problem, c.out_dtype, level, at);
      EXPECT_EQ(first_difference(actual, expected), -1) << isa_name(level) << ", " << at.name;
    }
  }
}

TEST(Memory, PlacementDoesNotChangeTheResult) {
  for (const Pattern pattern : {Pattern::kNone, Pattern::kMixed}) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t dim : {64, 80, 33}) {
        Case c = six_heads(pattern);
        c.batch = 2;
        c.q_len = 70;
        c.extra = 27;
        c.dim = c.v_dim = dim;
        c.q_dtype = c.kv_dtype = c.out_dtype = dtype;
        expect_placement_ignored(c);
      }
    }
  }
}

// The sweep's tensors end at a fence too.
TEST(Memory, FencedInputsGiveTheRightResult) {
  for (const Pattern pattern : {Pattern::kNone, Pattern::kMixed}) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t dim : {64, 80, 33}) {
        for (const std::int64_t kv_len : {1, 31, 33, 100}) {
          Case c = six_heads(pattern);
          c.q_len = std::min<std::int64_t>(kv_len, 67);
          c.extra = kv_len - c.q_len;
          c.dim = c.v_dim = dim;
          c.q_dtype = c.kv_dtype = c.out_dtype = dtype;
          expect_matches_reference(c, run_cpu, available_isa_levels());
          expect_placement_ignored(c);
        }
      }
    }
  }
}

// Tensors that claim more tokens than there is memory for, because the lengths say that they end.
TEST(Memory, NothingBeyondTheLengthsIsTouched) {
  for (const Pattern pattern : {Pattern::kNone, Pattern::kMixed}) {
    Case c = six_heads(pattern);
    c.q_len = 70;
    c.extra = 31;
    const Problem problem = make_problem(c);
    const std::int64_t q_lens[] = {c.q_len};
    const std::int64_t kv_lens[] = {c.q_len + c.extra};
    AttentionInput input = problem.input();
    const Result result = make_result(input, DType::kF32, Layout::kPacked);
    AttentionOutput output = result.output();
    for (TensorView* tensor : {&input.q, &input.k, &input.v, &output.out, &output.lse}) {
      tensor->shape[1] += 500;
    }
    input.q_lens = q_lens;
    input.kv_lens = kv_lens;
    const Result plain = make_result(problem.input(), DType::kF32, Layout::kPacked);
    for (const IsaLevel level : available_isa_levels()) {
      attention_cpu(problem.input(), problem.params, plain.output(), problem.index(), level);
      attention_cpu(input, problem.params, output, problem.index(), level);
      EXPECT_EQ(first_difference(result.out.values(), plain.out.values()), -1) << isa_name(level);
      EXPECT_EQ(first_difference(result.lse.values(), plain.lse.values()), -1) << isa_name(level);
    }
  }
}

// A matrix with odd strides, fenced.
struct FencedMatrix {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t stride;
  GuardedBuffer buffer;

  FencedMatrix(std::int64_t n_rows, std::int64_t n_cols, std::int64_t gap, Fence fence)
      : rows(n_rows),
        cols(n_cols),
        stride(n_cols + gap),
        buffer(2 * ((n_rows - 1) * stride + n_cols), fence) {}

  float* row(std::int64_t r) const { return reinterpret_cast<float*>(buffer.data()) + r * stride; }
};

// Small integers, exact in bf16, whose sums are exact in f32.
float small_integer(std::int64_t r, std::int64_t c) {
  return static_cast<float>((r * 7 + c * 3 + r * c) % 17 - 8);
}

FencedMatrix integers(std::int64_t rows, std::int64_t cols, std::int64_t gap, Fence fence) {
  FencedMatrix matrix(rows, cols, gap, fence);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) matrix.row(r)[c] = small_integer(r, c);
  }
  return matrix;
}

void unpack_row(const void* context, std::int64_t row, std::int64_t begin, std::int64_t count,
                float* out) {
  std::copy_n(static_cast<const FencedMatrix*>(context)->row(row) + begin, count, out);
}

void expect_exact_product(std::int64_t tokens, std::int64_t rows, std::int64_t cols,
                          std::int64_t gap, Fence fence, int threads) {
  const FencedMatrix a = integers(tokens, cols, gap, fence);
  const FencedMatrix w = integers(rows, cols, 0, fence);
  for (const IsaLevel level : available_isa_levels()) {
    const FencedMatrix c(tokens, rows, gap, fence);
    linear_cpu(a.row(0), a.stride, tokens, {rows, cols, unpack_row, &w}, c.row(0), c.stride, level,
               threads);
    for (std::int64_t m = 0; m < tokens; ++m) {
      for (std::int64_t n = 0; n < rows; ++n) {
        double expected = 0;
        for (std::int64_t k = 0; k < cols; ++k) expected += a.row(m)[k] * w.row(n)[k];
        ASSERT_EQ(c.row(m)[n], expected)
            << isa_name(level) << ", " << tokens << " x " << rows << " x " << cols << ", gap "
            << gap << ", " << threads << " threads, element " << m << ", " << n;
      }
    }
  }
}

TEST(Memory, FencedProductsAreExact) {
  for (const std::int64_t tokens : {1, 63, 64, 65}) {
    for (const std::int64_t rows : {1, 33, 129}) {
      for (const std::int64_t cols : {1, 31, 257}) {
        for (const Fence fence : {Fence::kBehind, Fence::kBefore}) {
          for (const std::int64_t gap : {0, 3}) {
            expect_exact_product(tokens, rows, cols, gap, fence, 2);
          }
        }
      }
    }
  }
}

TEST(Memory, UnpackersStayWithinTheirBlocks) {
  constexpr WeightFormat kFormats[] = {
      WeightFormat::kF32,  WeightFormat::kF16,  WeightFormat::kBF16, WeightFormat::kQ4_0,
      WeightFormat::kQ4_1, WeightFormat::kQ5_0, WeightFormat::kQ5_1, WeightFormat::kQ8_0,
      WeightFormat::kQ4K,  WeightFormat::kQ5K,  WeightFormat::kQ6K};
  for (const WeightFormat format : kFormats) {
    for (const std::int64_t blocks : {1, 3}) {
      const std::int64_t words = blocks * block_bytes(format) / 2;
      const std::int64_t elements = blocks * block_elements(format);
      for (const IsaLevel level : available_isa_levels()) {
        std::vector<float> expected;
        for (const Fence fence : {Fence::kBefore, Fence::kBehind}) {
          const GuardedBuffer data(words, fence);
          // Below the exponents of NaN in all types of scale.
          for (std::int64_t i = 0; i < words; ++i) {
            data.data()[i] = static_cast<std::uint16_t>(i * 2654435761U >> 7 & 0x3BFFU);
          }
          const GuardedBuffer out(2 * elements, fence);
          auto* values = reinterpret_cast<float*>(out.data());
          unpacker(format, level)(data.data(), blocks, values);
          if (expected.empty()) expected.assign(values, values + elements);
          EXPECT_EQ(first_difference({values, values + elements}, expected), -1)
              << isa_name(level) << ", format " << static_cast<int>(format);
        }
      }
    }
  }
}

// ---- sizes -----------------------------------------------------------------------------------

TEST(Sizes, OneTokenAndNone) {
  for (const Pattern pattern : {Pattern::kNone, Pattern::kMixed}) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t kv_len : {0, 1, 33, 129}) {
        Case c = six_heads(pattern);
        c.q_dtype = c.kv_dtype = dtype;
        c.q_len = 1;
        c.extra = kv_len - 1;
        expect_matches_reference(c, run_cpu, available_isa_levels());
        c.q_len = 0;
        c.extra = kv_len;
        expect_matches_reference(c, run_cpu, available_isa_levels());
      }
      Case c = six_heads(pattern);
      c.q_dtype = c.kv_dtype = dtype;
      c.batch = 3;
      c.lengths = Lengths::kSomeEmpty;
      expect_matches_reference(c, run_cpu, available_isa_levels());
    }
  }
}

TEST(Sizes, MoreThreadsThanRows) {
  for (const Pattern pattern : {Pattern::kNone, Pattern::kMixed}) {
    Case c = six_heads(pattern);
    c.q_len = 3;
    c.extra = 70;
    for (const int threads : {1, 64}) {
      const auto run = [&](const AttentionInput& input, AttentionParams params,
                           const AttentionOutput& output, const SparseIndex* index,
                           IsaLevel level) {
        params.threads = threads;
        return attention_cpu(input, params, output, index, level);
      };
      expect_matches_reference(c, run, available_isa_levels());
    }
  }
  for (const int threads : {1, 64}) expect_exact_product(3, 5, 7, 0, Fence::kBehind, threads);
}

// ---- numbers that are none ---------------------------------------------------------------------

// Which keys each row of a head sees.
class Sight {
 public:
  Sight(const Problem& problem, std::int64_t h)
      : mask_(explicit_mask(problem.input(), problem.params, 0, h, problem.index())),
        keys_(key_length(problem.input(), 0)) {}

  bool sees(std::int64_t row, std::int64_t key) const { return mask_[row * keys_ + key] != 0; }

 private:
  std::vector<std::uint8_t> mask_;
  std::int64_t keys_;
};

// Every rule that hides keys, alone: the causal one, a window, a mask, and the forms of an index.
std::vector<Case> hiding_cases() {
  Case causal = six_heads(Pattern::kNone);
  causal.q_len = 150;  // three row blocks, the last of them partial in rows and in 16-row strips
  causal.extra = 49;
  causal.dim = causal.v_dim = 48;
  Case window = causal;
  window.window = 70;
  Case mask = causal;
  mask.mask = MaskKind::kRandom;
  std::vector<Case> cases = {causal, window, mask};
  for (const Pattern pattern : {Pattern::kUnionRuns, Pattern::kStridedRuns, Pattern::kBlocks}) {
    cases.push_back(causal);
    cases.back().pattern = pattern;
  }
  cases.push_back(causal);
  cases.back().pattern = Pattern::kMixed;
  cases.back().dense_last_rows = 21;
  const std::size_t n = cases.size();
  for (std::size_t i = 0; i < n; ++i) {
    cases.push_back(cases[i]);
    cases.back().q_dtype = cases.back().kv_dtype = i % 2 == 0 ? DType::kBF16 : DType::kF16;
  }
  return cases;
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// The first key, edges of granules, tiles and batches, the middle, and the last one.
constexpr std::int64_t kSpoiledKeys[] = {0, 31, 32, 77, 127, 128, 150, 198};

TEST(NonFinite, ValueReachesOnlyTheRowsThatSeeIt) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    Problem spoiled = make_problem(c);
    // Dim 5 gets NaN, dim 20 +inf and dim 21 -inf; where a row sees the keys of both, dim 40 is
    // +inf - inf = NaN. One head is spoiled everywhere, the others at one key each.
    const auto keys_of = [&](std::int64_t h) {
      if (h == 0)
        return std::vector<std::int64_t>(std::begin(kSpoiledKeys), std::end(kSpoiledKeys));
      return std::vector<std::int64_t>{kSpoiledKeys[h]};
    };
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      for (const std::int64_t key : keys_of(h)) {
        spoiled.v.set(0, key, h, 5, kNaN);
        spoiled.v.set(0, key, h, 20, kInfinity);
        spoiled.v.set(0, key, h, 21, -kInfinity);
        spoiled.v.set(0, key, h, 40, key < 100 ? kInfinity : -kInfinity);
      }
    }
    for (const IsaLevel level : available_isa_levels()) {
      const Result expected = make_result(clean.input(), DType::kF32, Layout::kPacked);
      const Result actual = make_result(clean.input(), DType::kF32, Layout::kPacked);
      attention_cpu(clean.input(), clean.params, expected.output(), clean.index(), level);
      attention_cpu(spoiled.input(), clean.params, actual.output(), clean.index(), level);
      EXPECT_EQ(first_difference(actual.lse.values(), expected.lse.values()), -1);
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        const Sight sight(clean, h);
        for (std::int64_t row = 0; row < c.q_len; ++row) {
          const auto sees = [&](bool late) {
            const std::vector<std::int64_t> keys = keys_of(h);
            return std::any_of(keys.begin(), keys.end(), [&](std::int64_t key) {
              return (key >= 100) == late && sight.sees(row, key);
            });
          };
          const bool early = sees(false);
          const bool late = sees(true);
          for (std::int64_t d = 0; d < c.v_dim; ++d) {
            const float value = actual.out.get(0, row, h, d);
            bool right = same_bits(value, expected.out.get(0, row, h, d));
            if (early || late) {
              if (d == 5) right = std::isnan(value);
              // A weight below the smallest float is 0, and makes NaN of an infinity.
              if (d == 20) right = value == kInfinity || std::isnan(value);
              if (d == 21) right = value == -kInfinity || std::isnan(value);
              if (d == 40 && early && late) right = std::isnan(value);
              if (d == 40 && early != late) right = std::isinf(value) || std::isnan(value);
            }
            ASSERT_TRUE(right) << isa_name(level) << ", head " << h << ", row " << row << ", dim "
                               << d << ": " << value << ", sees " << early << late;
          }
        }
      }
    }
  }
}

TEST(NonFinite, KeyReachesOnlyTheRowsThatSeeIt) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    for (const float bad : {kNaN, kInfinity, -kInfinity}) {
      Problem spoiled = make_problem(c);
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        // Zero queries make NaN of an infinity too: everything is spoiled, whatever its sign.
        for (std::int64_t d = 0; d < c.dim; ++d) spoiled.k.set(0, kSpoiledKeys[h], h, d, bad);
      }
      for (const IsaLevel level : available_isa_levels()) {
        const Result expected = make_result(clean.input(), DType::kF32, Layout::kPacked);
        const Result actual = make_result(clean.input(), DType::kF32, Layout::kPacked);
        attention_cpu(clean.input(), clean.params, expected.output(), clean.index(), level);
        attention_cpu(spoiled.input(), clean.params, actual.output(), clean.index(), level);
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const Sight sight(clean, h);
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const bool sees = sight.sees(row, kSpoiledKeys[h]);
            const float lse = actual.lse.get(0, row, h, 0);
            ASSERT_TRUE(sees ? std::isnan(lse) : same_bits(lse, expected.lse.get(0, row, h, 0)));
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              ASSERT_TRUE(sees ? std::isnan(value)
                               : same_bits(value, expected.out.get(0, row, h, d)))
                  << isa_name(level) << ", key of " << bad << ", head " << h << ", row " << row
                  << ", dim " << d << ": " << value;
            }
          }
        }
      }
    }
  }
}

TEST(NonFinite, QueryReachesItsOwnRowOnly) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    for (const float bad : {kNaN, kInfinity}) {
      Problem spoiled = make_problem(c);
      // First, inner and last rows of row blocks and of strips of 16 rows.
      const std::vector<std::int64_t> rows = {0, 15, 16, 63, 64, 100, 149};
      for (const std::int64_t row : rows) {
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          for (std::int64_t d = 0; d < c.dim; ++d) spoiled.q.set(0, row, h, d, bad);
        }
      }
      for (const IsaLevel level : available_isa_levels()) {
        const Result expected = make_result(clean.input(), DType::kF32, Layout::kPacked);
        const Result actual = make_result(clean.input(), DType::kF32, Layout::kPacked);
        attention_cpu(clean.input(), clean.params, expected.output(), clean.index(), level);
        attention_cpu(spoiled.input(), clean.params, actual.output(), clean.index(), level);
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const float lse = expected.lse.get(0, row, h, 0);
            // A row that sees no key is 0 whatever its query.
            const bool spoils =
                std::find(rows.begin(), rows.end(), row) != rows.end() && lse != -kInfinity;
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              ASSERT_TRUE(spoils ? std::isnan(value)
                                 : same_bits(value, expected.out.get(0, row, h, d)))
                  << isa_name(level) << ", query of " << bad << ", head " << h << ", row " << row
                  << ", dim " << d << ": " << value;
            }
          }
        }
      }
    }
  }
}

// Rows whose query is positive in dim 0 score +inf at the spoiled keys, the others -inf.
TEST(NonFinite, InfiniteScoresAreJudgedByTheReference) {
  for (Case c : hiding_cases()) {
    for (const float cap : {0.0F, 5.0F}) {
      c.soft_cap = cap;
      SCOPED_TRACE(describe(c));
      const Problem clean = make_problem(c);
      Problem spoiled = make_problem(c);
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        spoiled.k.set(0, kSpoiledKeys[h], h, 0, kInfinity);
      }
      const Result expected = make_result(clean.input(), DType::kF32, Layout::kPacked);
      attention_reference(spoiled.input(), spoiled.params, expected.output(), spoiled.index());
      for (const IsaLevel level : available_isa_levels()) {
        const Result undisturbed = make_result(clean.input(), DType::kF32, Layout::kPacked);
        const Result actual = make_result(clean.input(), DType::kF32, Layout::kPacked);
        attention_cpu(clean.input(), clean.params, undisturbed.output(), clean.index(), level);
        attention_cpu(spoiled.input(), clean.params, actual.output(), clean.index(), level);
        // Values are of order 4, scores of order 5: the tolerance is their rounding.
        const float tolerance =
            isa_is_bf16(level) || c.kv_dtype != DType::kF32 ? 0x1p-4F : 0x1p-15F;
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const Sight sight(clean, h);
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const bool sees = sight.sees(row, kSpoiledKeys[h]);
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              const float judge = expected.out.get(0, row, h, d);
              const bool right = !sees ? same_bits(value, undisturbed.out.get(0, row, h, d))
                                 : std::isnan(judge) ? std::isnan(value)
                                                     : std::abs(value - judge) <= tolerance;
              ASSERT_TRUE(right) << isa_name(level) << ", head " << h << ", row " << row << ", dim "
                                 << d << ": " << value << " for " << judge;
            }
            if (!std::isnan(expected.out.get(0, row, h, 0)) && sees) {
              const float lse = expected.lse.get(0, row, h, 0);
              ASSERT_TRUE(lse == actual.lse.get(0, row, h, 0) ||
                          std::abs(lse - actual.lse.get(0, row, h, 0)) <= tolerance);
            }
          }
        }
      }
    }
  }
}

TEST(NonFinite, ScoresOfMinusInfinityCountAsUnseenKeys) {
  Case c;
  c.q_len = 70;
  c.extra = 0;
  Problem problem = make_problem(c);
  for (std::int64_t h = 0; h < c.q_heads; ++h) {
    for (std::int64_t t = 0; t < c.q_len; ++t) problem.q.set(0, t, h, 0, 1.0F);
  }
  for (std::int64_t h = 0; h < c.kv_heads; ++h) {  // rows 0 to 39 see no other key
    for (std::int64_t t = 0; t < 40; ++t) problem.k.set(0, t, h, 0, -kInfinity);
  }
  for (const IsaLevel level : available_isa_levels()) {
    const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
    attention_cpu(problem.input(), problem.params, result.output(), nullptr, level);
    for (std::int64_t t = 0; t < c.q_len; ++t) {
      const float lse = result.lse.get(0, t, 1, 0);
      ASSERT_TRUE(t < 40 ? lse == -kInfinity : std::isfinite(lse)) << isa_name(level) << ' ' << t;
      for (std::int64_t d = 0; d < c.v_dim; ++d) {
        const float value = result.out.get(0, t, 1, d);
        ASSERT_TRUE(t < 40 ? value == 0.0F : std::isfinite(value)) << isa_name(level) << ' ' << t;
      }
    }
  }
}

TEST(NonFinite, WeightRowReachesItsOwnColumnOnly) {
  constexpr std::int64_t kTokens = 70;
  constexpr std::int64_t kRows = 50;
  constexpr std::int64_t kCols = 300;
  const FencedMatrix a = integers(kTokens, kCols, 0, Fence::kBehind);
  const FencedMatrix w = integers(kRows, kCols, 0, Fence::kBehind);
  w.row(17)[290] = kNaN;
  for (const IsaLevel level : available_isa_levels()) {
    const FencedMatrix c(kTokens, kRows, 0, Fence::kBehind);
    linear_cpu(a.row(0), kCols, kTokens, {kRows, kCols, unpack_row, &w}, c.row(0), kRows, level, 2);
    for (std::int64_t m = 0; m < kTokens; ++m) {
      for (std::int64_t n = 0; n < kRows; ++n) {
        ASSERT_EQ(std::isnan(c.row(m)[n]), n == 17) << isa_name(level) << ' ' << m << ' ' << n;
      }
    }
  }
}

}  // namespace
}  // namespace minference::test
