#include "support/problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <random>
#include <sstream>

namespace minference::test {
namespace {

using Random = std::mt19937_64;

std::int64_t pick(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// Length of sequence b when the longest is `full`.
std::int64_t ragged(std::int64_t full, std::int64_t b) {
  constexpr std::int64_t kRatio[] = {5, 2, 1};
  return std::max<std::int64_t>(1, full * kRatio[b % 3] / 5);
}

void make_lengths(const Case& c, Problem& problem) {
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const bool full = c.lengths == Lengths::kFull;
    const std::int64_t q_len = full ? c.q_len : ragged(c.q_len, b);
    const std::int64_t extra = full || c.extra == 0 ? c.extra : c.extra * (b + 1) / c.batch;
    problem.q_lens.push_back(q_len);
    problem.kv_lens.push_back(std::max<std::int64_t>(0, q_len + extra));
  }
  if (c.lengths == Lengths::kSomeEmpty) {
    problem.q_lens.front() = 0;
    problem.kv_lens.back() = 0;
  }
}

// A row of sequence b of keys or values, wherever it lies.
struct Place {
  std::int64_t b;
  std::int64_t t;
};

Place kv_place(const Problem& problem, std::int64_t page_size, std::int64_t b, std::int64_t t) {
  if (page_size == 0) return {b, t};
  return {problem.block_table[b * problem.pages_per_sequence + t / page_size], t % page_size};
}

void make_kv_storage(const Case& c, Problem& problem, Random& random) {
  const std::int64_t longest = *std::max_element(problem.kv_lens.begin(), problem.kv_lens.end());
  // Full cases keep the tensors exactly as long as the text; the others have poisoned rows behind.
  const std::int64_t tokens = c.lengths == Lengths::kFull ? longest : longest + 3;
  if (c.page_size == 0) {
    problem.k = TensorData({c.batch, tokens, c.kv_heads, c.dim}, c.kv_dtype, c.layout);
    problem.v = TensorData({c.batch, tokens, c.kv_heads, c.v_dim}, c.kv_dtype, c.layout);
    return;
  }
  problem.pages_per_sequence = std::max<std::int64_t>(1, (tokens - 1) / c.page_size + 1);
  const std::int64_t pages = c.batch * problem.pages_per_sequence + 2;
  std::vector<std::int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  problem.block_table.assign(order.begin(), order.begin() + c.batch * problem.pages_per_sequence);
  for (std::int64_t b = 0; b < c.batch; ++b) {  // entries behind the text are never looked at
    const std::int64_t used = (problem.kv_lens[b] + c.page_size - 1) / c.page_size;
    std::fill(problem.block_table.begin() + b * problem.pages_per_sequence + used,
              problem.block_table.begin() + (b + 1) * problem.pages_per_sequence, -1);
  }
  problem.k = TensorData({pages, c.page_size, c.kv_heads, c.dim}, c.kv_dtype, c.layout);
  problem.v = TensorData({pages, c.page_size, c.kv_heads, c.v_dim}, c.kv_dtype, c.layout);
}

// What fills one element.
class Filler {
 public:
  Filler(Values values, DType dtype, Random& random)
      : values_(values), dtype_(dtype), random_(random) {}

  float next() {
    switch (values_) {
      case Values::kOrder1:
      case Values::kDominantKey:
        return normal_(random_);
      case Values::kOrder30:
        return 30 * normal_(random_);
      case Values::kAllEqual:
        return 0.75F;
      case Values::kZeros:
        return 0;
      case Values::kDenormals: {
        // A few units of the smallest subnormal of the type, of either sign.
        const float smallest = dtype_ == DType::kF16    ? 0x1p-24F
                               : dtype_ == DType::kBF16 ? 0x1p-133F
                                                        : 0x1p-149F;
        return smallest * static_cast<float>(pick(random_, -5, 5));
      }
      case Values::kExact:
        break;
    }
    return static_cast<float>(pick(random_, -8, 8));
  }

 private:
  Values values_;
  DType dtype_;
  Random& random_;
  std::normal_distribution<float> normal_;
};

void fill_q(const Case& c, Problem& problem, Random& random) {
  Filler filler(c.values, c.q_dtype, random);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t t = 0; t < problem.q_lens[b]; ++t) {
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        for (std::int64_t d = 0; d < c.dim; ++d) {
          float value = c.values == Values::kExact ? 0.0F : filler.next();
          if (c.values == Values::kDominantKey && d == 0) value = 8;
          problem.q.set(b, t, h, d, value);
        }
      }
    }
  }
}

void fill_kv(const Case& c, Problem& problem, Random& random) {
  Filler filler(c.values, c.kv_dtype, random);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      const std::int64_t length = problem.kv_lens[b];
      const std::int64_t dominant = length == 0 ? 0 : pick(random, 0, length - 1);
      for (std::int64_t t = 0; t < length; ++t) {
        const Place at = kv_place(problem, c.page_size, b, t);
        for (std::int64_t d = 0; d < c.dim; ++d) {
          float value = filler.next();
          if (c.values == Values::kDominantKey && d == 0 && t == dominant) value = 40;
          problem.k.set(at.b, at.t, h, d, value);
        }
        for (std::int64_t d = 0; d < c.v_dim; ++d) problem.v.set(at.b, at.t, h, d, filler.next());
      }
    }
  }
}

bool mask_bit(MaskKind kind, std::int64_t position, std::int64_t row, std::int64_t key,
              std::int64_t pad, Random& random) {
  switch (kind) {
    case MaskKind::kNone:
      break;
    case MaskKind::kCausal:
      return key <= position;
    case MaskKind::kLeftPad:
      return key <= position && key >= pad;
    case MaskKind::kRandom:
      return row % 7 != 3 && (random() & 1) != 0;
  }
  return true;
}

void make_mask(const Case& c, Problem& problem, Random& random) {
  if (c.mask == MaskKind::kNone) return;
  const std::int64_t longest = *std::max_element(problem.kv_lens.begin(), problem.kv_lens.end());
  problem.mask.row_stride = longest / 64 + 2;  // one word more than needed, at least
  problem.mask.sequence_stride = c.q_len * problem.mask.row_stride + 1;
  // All ones, so that a bit which should not be read shows a key that does not exist.
  problem.mask_words.assign(c.batch * problem.mask.sequence_stride, ~std::uint64_t{0});
  problem.mask.words = problem.mask_words.data();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t pad = problem.kv_lens[b] / 3 + b;
    for (std::int64_t row = 0; row < problem.q_lens[b]; ++row) {
      const std::int64_t position = problem.kv_lens[b] - problem.q_lens[b] + row;
      std::uint64_t* words = problem.mask_words.data() + b * problem.mask.sequence_stride +
                             row * problem.mask.row_stride;
      for (std::int64_t key = 0; key < problem.kv_lens[b]; ++key) {
        if (!mask_bit(c.mask, position, row, key, pad, random)) {
          words[key / 64] &= ~(std::uint64_t{1} << (key % 64));
        }
      }
    }
  }
}

// Probability that an element is chosen at a budget.
double density(Budget budget) {
  switch (budget) {
    case Budget::kNothing:
    case Budget::kOne:
      return 0;
    case Budget::kSome:
      return 0.15;
    case Budget::kAll:
    case Budget::kMoreThanAll:
      break;
  }
  return 1;
}

std::vector<std::int64_t> random_columns(Budget budget, std::int64_t kv_tokens, Random& random) {
  std::vector<std::int64_t> columns;
  std::bernoulli_distribution chosen(density(budget));
  for (std::int64_t key = 0; key < kv_tokens; ++key) {
    if (chosen(random)) columns.push_back(key);
  }
  if (budget == Budget::kOne && kv_tokens > 0) columns.push_back(pick(random, 0, kv_tokens - 1));
  return columns;
}

std::vector<OffsetRun> random_runs(Budget budget, std::int64_t kv_tokens, std::int64_t max_stride,
                                   Random& random) {
  switch (budget) {
    case Budget::kNothing:
      return {};
    case Budget::kOne: {
      const std::int64_t offset = pick(random, 0, std::max<std::int64_t>(0, kv_tokens - 1));
      return {{offset, offset + 1, 1}};
    }
    case Budget::kSome:
      break;
    case Budget::kAll:
      return {{0, std::max<std::int64_t>(1, kv_tokens), 1}};
    case Budget::kMoreThanAll:
      return {{0, std::int64_t{1} << 40, 1}};
  }
  std::vector<OffsetRun> runs;
  std::int64_t begin = pick(random, 0, 3);
  while (begin < kv_tokens) {
    const std::int64_t length = random() % 3 == 0 ? 1 : pick(random, 1, 90);
    runs.push_back({begin, begin + length, pick(random, 1, max_stride)});
    begin += length + pick(random, 1, 150);
  }
  return runs;
}

void make_blocks(Budget budget, std::int64_t q_tokens, std::int64_t kv_tokens, HeadIndex& head,
                 Random& random) {
  head.kind = HeadIndex::Kind::kBlock;
  const std::int64_t row_blocks = (q_tokens + kRowBlock - 1) / kRowBlock;
  const std::int64_t key_blocks = (kv_tokens + kKeyBlock - 1) / kKeyBlock;
  head.block_begin.push_back(0);
  for (std::int64_t m = 0; m < row_blocks; ++m) {
    for (const std::int64_t id : random_columns(budget, key_blocks, random)) {
      head.block_ids.push_back(static_cast<std::int32_t>(id));
    }
    head.block_begin.push_back(static_cast<std::int64_t>(head.block_ids.size()));
  }
}

HeadIndex make_head(Pattern pattern, Budget budget, std::int64_t q_tokens, std::int64_t kv_tokens,
                    Random& random) {
  HeadIndex head;
  switch (pattern) {
    case Pattern::kNone:
    case Pattern::kMixed:
    case Pattern::kDenseHeads:
      break;
    case Pattern::kAShape:
      head.kind = HeadIndex::Kind::kDiagonal;
      head.rounding = RunRounding::kNone;
      for (std::int64_t key = 0; key < std::min<std::int64_t>(kv_tokens, 5); ++key) {
        head.columns.push_back(key);
      }
      // The longest holds whole boxes of keys for every row of a row block.
      head.runs = {{0, budget == Budget::kOne ? 1 : (budget < Budget::kAll ? 37 : 300), 1}};
      break;
    case Pattern::kUnionRuns:
    case Pattern::kBoxRuns:
    case Pattern::kExactRuns:
    case Pattern::kStridedRuns:
      head.kind = HeadIndex::Kind::kDiagonal;
      head.rounding = pattern == Pattern::kUnionRuns ? RunRounding::kGranule
                      : pattern == Pattern::kBoxRuns ? RunRounding::kBox
                                                     : RunRounding::kNone;
      head.columns = random_columns(budget, kv_tokens, random);
      head.runs = random_runs(budget, kv_tokens, pattern == Pattern::kStridedRuns ? 3 : 1, random);
      break;
    case Pattern::kBlocks:
      make_blocks(budget, q_tokens, kv_tokens, head, random);
      break;
  }
  return head;
}

void make_index(const Case& c, Problem& problem, Random& random) {
  if (c.pattern == Pattern::kNone) return;
  constexpr Pattern kTurn[] = {Pattern::kUnionRuns,   Pattern::kBlocks,  Pattern::kDenseHeads,
                               Pattern::kStridedRuns, Pattern::kBoxRuns, Pattern::kExactRuns};
  const std::int64_t kv_tokens =
      c.page_size == 0 ? problem.k.view().tokens() : problem.pages_per_sequence * c.page_size;
  SparseIndex index;
  index.batch = c.batch;
  index.q_heads = c.q_heads;
  for (std::int64_t i = 0; i < c.batch * c.q_heads; ++i) {
    const Pattern pattern = c.pattern == Pattern::kMixed ? kTurn[i % 6] : c.pattern;
    index.heads.push_back(make_head(pattern, c.budget, c.q_len, kv_tokens, random));
    index.heads.back().dense_last_rows = c.dense_last_rows;
  }
  problem.sparse = std::move(index);
}

}  // namespace

AttentionInput Problem::input() const {
  AttentionInput in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.q_lens = q_lens;
  in.kv_lens = kv_lens;
  in.block_table = block_table;
  in.pages_per_sequence = pages_per_sequence;
  in.sinks = sinks;
  in.mask = mask;
  return in;
}

Problem make_problem(const Case& c) {
  Random random(c.seed);
  Problem problem;
  make_lengths(c, problem);
  problem.q = TensorData({c.batch, c.q_len, c.q_heads, c.dim}, c.q_dtype, c.layout);
  make_kv_storage(c, problem, random);
  fill_q(c, problem, random);
  fill_kv(c, problem, random);
  if (c.sinks) {
    std::normal_distribution<float> normal;
    for (std::int64_t h = 0; h < c.q_heads; ++h) problem.sinks.push_back(2 * normal(random));
  }
  make_mask(c, problem, random);
  make_index(c, problem, random);
  problem.params.scale = c.scale;
  problem.params.soft_cap = c.soft_cap;
  problem.params.sliding_window = c.window;
  problem.params.causal = c.causal;
  // Without padding the lengths say nothing, and leaving them out is a path of its own.
  if (c.lengths == Lengths::kFull && c.seed % 2 == 1) {
    problem.q_lens.clear();
    if (c.page_size == 0) problem.kv_lens.clear();
  }
  return problem;
}

Case six_heads(Pattern pattern) {
  Case c;
  c.q_heads = c.kv_heads = 6;
  c.pattern = pattern;
  return c;
}

Result make_result(const AttentionInput& input, DType dtype, Layout layout) {
  const TensorView& q = input.q;
  return {TensorData({q.batch(), q.tokens(), q.heads(), input.v.dim()}, dtype, layout),
          TensorData({q.batch(), q.tokens(), q.heads(), 1}, DType::kF32, layout)};
}

std::int64_t cost(const Case& c) {
  return c.batch * c.q_heads * c.q_len * std::max<std::int64_t>(0, c.q_len + c.extra) *
         (c.dim + c.v_dim);
}

std::string describe(const Case& c) {
  static constexpr const char* kLayouts[] = {"packed", "padded rows", "head-major"};
  static constexpr const char* kLengths[] = {"full", "ragged", "some empty"};
  static constexpr const char* kValues[] = {"order 1", "order 30",  "all equal", "dominant key",
                                            "zeros",   "denormals", "exact"};
  static constexpr const char* kMasks[] = {"none", "causal", "left pad", "random"};
  static constexpr const char* kPatterns[] = {"none",         "dense heads", "A-shape",
                                              "union runs",   "box runs",    "exact runs",
                                              "strided runs", "blocks",      "mixed"};
  static constexpr const char* kBudgets[] = {"nothing", "one", "some", "all", "more than all"};
  std::ostringstream text;
  text << "batch " << c.batch << ", q " << c.q_len << " + " << c.extra << ", heads " << c.q_heads
       << ":" << c.kv_heads << ", dim " << c.dim << "/" << c.v_dim << ", q "
       << dtype_name(c.q_dtype) << ", kv " << dtype_name(c.kv_dtype) << ", out "
       << dtype_name(c.out_dtype) << ", " << kLayouts[static_cast<int>(c.layout)];
  if (c.page_size != 0) text << ", page " << c.page_size;
  text << ", lengths " << kLengths[static_cast<int>(c.lengths)] << ", values "
       << kValues[static_cast<int>(c.values)] << ", mask " << kMasks[static_cast<int>(c.mask)]
       << ", pattern " << kPatterns[static_cast<int>(c.pattern)] << " ("
       << kBudgets[static_cast<int>(c.budget)] << ")";
  if (c.dense_last_rows != 0) text << ", dense last rows " << c.dense_last_rows;
  if (c.scale != 0) text << ", scale " << c.scale;
  if (c.soft_cap != 0) text << ", soft cap " << c.soft_cap;
  if (c.window != 0) text << ", window " << c.window;
  if (c.sinks) text << ", sinks";
  if (!c.causal) text << ", not causal";
  text << ", seed " << c.seed;
  return text.str();
}

std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << describe(c); }

}  // namespace minference::test
