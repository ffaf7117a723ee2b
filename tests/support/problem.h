// Problem: the tensors, lengths, mask and index of one attention call, generated from a Case.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"
#include "support/tensor_data.h"

namespace minference::test {

enum class Values {
  kOrder1,
  kOrder30,
  kAllEqual,
  kDominantKey,  // order 1, and one key per KV head that outweighs all others for every query
  kZeros,
  kDenormals,
  // Zero queries, small-integer values: every visible key has weight 1, so the sums are exact and a
  // single key too many or too few shows, however many there are.
  kExact,
};

enum class Lengths {
  kFull,       // every sequence has q_len rows
  kRagged,     // lengths in ratio 5 : 2 : 1, the rest of each tensor poisoned
  kSomeEmpty,  // as ragged, but the first sequence has no rows and the last no keys
};

enum class MaskKind {
  kNone,
  kCausal,   // the causal rule spelled out
  kLeftPad,  // causal, and the first keys of a sequence are padding: some rows see nothing
  kRandom,   // any key with probability 1/2, later ones too; some rows empty
};

enum class Pattern {
  kNone,         // no index
  kDenseHeads,   // an index of dense heads
  kAShape,       // leading columns and one exact run at offset 0
  kUnionRuns,    // random columns and block-union runs, rounded to granules
  kBoxRuns,      // the same, filled up to boxes
  kExactRuns,    // random columns and exact runs
  kStridedRuns,  // exact runs with strides 1, 2, 3
  kBlocks,       // random key blocks
  kMixed,        // heads take the forms above in turn, with dense last rows
};

enum class Budget { kNothing, kOne, kSome, kAll, kMoreThanAll };

// One point of the grid. The defaults are the point from which the axes are swept.
struct Case {
  std::int64_t batch = 1;
  std::int64_t q_len = 65;
  std::int64_t extra = 63;  // kv length minus q length, may be negative
  std::int64_t q_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t dim = 64;
  std::int64_t v_dim = 64;
  DType q_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  Layout layout = Layout::kPacked;
  std::int64_t page_size = 0;  // 0: not paged; pages are shuffled
  Lengths lengths = Lengths::kFull;
  Values values = Values::kOrder1;
  MaskKind mask = MaskKind::kNone;
  Pattern pattern = Pattern::kNone;
  Budget budget = Budget::kSome;
  std::int64_t dense_last_rows = 0;
  float scale = 0;
  float soft_cap = 0;
  std::int64_t window = 0;
  bool sinks = false;
  bool causal = true;
  std::uint64_t seed = 1;
};

// Every field that differs from the default, on one line.
std::string describe(const Case& c);
std::ostream& operator<<(std::ostream& stream, const Case& c);

// Multiply-adds of the case, an upper bound for planning.
std::int64_t cost(const Case& c);

struct Problem {
  TensorData q;
  TensorData k;
  TensorData v;
  std::vector<std::int64_t> q_lens;
  std::vector<std::int64_t> kv_lens;
  std::vector<std::int32_t> block_table;
  std::int64_t pages_per_sequence = 0;
  std::vector<float> sinks;
  std::vector<std::uint64_t> mask_words;
  VisibilityMask mask;
  std::optional<SparseIndex> sparse;
  AttentionParams params;

  AttentionInput input() const;
  const SparseIndex* index() const { return sparse ? &*sparse : nullptr; }
};

Problem make_problem(const Case& c);

// A poisoned output tensor and LSE for a problem.
struct Result {
  TensorData out;
  TensorData lse;

  AttentionOutput output() const { return {out.view(), lse.view()}; }
};

// Six heads, so that a mixed index has one head of each form.
Case six_heads(Pattern pattern);

Result make_result(const AttentionInput& input, DType dtype, Layout layout);

}  // namespace minference::test
