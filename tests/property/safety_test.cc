// Whatever memory and sizes a caller brings: nothing is touched that is not part of the call.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/cpu/executor.h"
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
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

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
    view_ = {nullptr, dtype, shape, {sequence, at.backwards ? -token : token, head, 1}, {}};
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
