// SparseIndex: which keys each query row may see, in one of two forms, per (batch, query head).
#pragma once

#include <cstdint>
#include <vector>

namespace minference {

// Indices are stored in row blocks of this many query rows, whatever tile the executor uses.
inline constexpr std::int64_t kRowBlock = 64;
// Keys of one block of the block form.
inline constexpr std::int64_t kKeyBlock = 64;
// Keys, from multiples of it, to which RunRounding::kGranule rounds outwards.
inline constexpr std::int64_t kRunGranule = 32;
// Keys of a box of RunRounding::kBox.
inline constexpr std::int64_t kRunBox = 64;

// Which keys runs of slash offsets cover, beyond the offsets themselves: what a kernel would compute
// and throw away.
enum class RunRounding : std::uint8_t {
  // Key j is covered for row i when a run contains the offset of (r, g) for some row r of i's row
  // block of kRowBlock rows and some key g of j's granule of kRunGranule keys: whole tiles, as the
  // reference system's, cut at multiples of 32 keys. The CPU's kernels load those.
  kGranule,
  // A run [begin, end) covers, for a row block whose first row stands at position p, the last
  // 64 * ceil((end - begin + 63) / 64) keys before p + 64 - begin: all that the block's rows (were they
  // 64) have in the run, filled up to boxes of kRunBox keys from any key on. CUDA's kernels load those.
  kBox,
  kNone,  // a run contains the offset of (i, j) itself
};

// A run of slash offsets. The offset of a key is its distance behind the query:
// offset = query position - key position, where the query position is kv_len - q_len + row.
// Covers offsets begin, begin + stride, ... < end.
struct OffsetRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t stride = 1;

  bool contains(std::int64_t offset) const {
    return offset >= begin && offset < end && (offset - begin) % stride == 0;
  }
};

// The keys of one query head. The causal rule, or the mask in its place, and the sliding window
// always apply on top.
struct HeadIndex {
  enum class Kind : std::uint8_t { kDense, kDiagonal, kBlock };
  Kind kind = Kind::kDense;

  // Diagonal form: row i sees key j when j is in `columns`, or when it is covered by `runs`. Runs are
  // relative, so they are merged once per head and hold for every row block; no per-row index exists.
  std::vector<std::int64_t> columns;  // absolute key positions, strictly ascending
  std::vector<OffsetRun> runs;  // ascending, not overlapping; of stride 1 where they are rounded
  RunRounding rounding = RunRounding::kGranule;

  // Block form: row block m sees the key blocks block_ids[block_begin[m] ... block_begin[m + 1]),
  // ascending, where key block n holds keys [n * kKeyBlock, (n + 1) * kKeyBlock).
  std::vector<std::int64_t> block_begin;  // row blocks + 1 entries
  std::vector<std::int32_t> block_ids;

  // Either form: the last rows of the sequence that see every key (tri-shape).
  std::int64_t dense_last_rows = 0;
};

// One HeadIndex per sequence and query head, and what building it cost.
struct SparseIndex {
  std::int64_t batch = 0;
  std::int64_t q_heads = 0;
  std::vector<HeadIndex> heads;  // [batch][q_heads]
  double build_seconds = 0.0;

  const HeadIndex& head(std::int64_t b, std::int64_t h) const { return heads[b * q_heads + h]; }
  HeadIndex& head(std::int64_t b, std::int64_t h) { return heads[b * q_heads + h]; }
};

// Sorts runs by begin and joins those that overlap, touch, or leave a gap of at most `max_gap`
// offsets (a superset: joined gaps are computed too). All runs must have stride 1.
std::vector<OffsetRun> merge_runs(std::vector<OffsetRun> runs, std::int64_t max_gap = 0);

// Throws InvalidArgument, naming the head and the value, unless `index` is well formed for these
// sizes: heads for every (batch, head), columns strictly ascending and below kv_tokens, runs
// ascending and disjoint, block CSR of the right length with ascending ids below the block count.
void validate(const SparseIndex& index, std::int64_t batch, std::int64_t q_heads,
              std::int64_t q_tokens, std::int64_t kv_tokens);

}  // namespace minference
