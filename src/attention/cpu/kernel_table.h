// KernelTable: the tile kernels of one ISA level, as plain function pointers.
//
// Everything that depends on the instruction set is behind this table; the executor, the estimators
// and the guard are compiled once at the baseline ISA and call it per tile.
//
// Packed layouts, shared by all levels (pair = 2 elements for bf16 levels, 1 for f32 levels):
//   keys    16 keys a block:  [dim / pair][16 keys][pair]        key block b at b * 16 * dim
//   values  32 keys a block:  [v_dim / 16][32 / pair][16][pair]  key block b at b * 32 * v_dim
// Kernels work on batches of up to four granules of 32 packed keys, from anywhere. Dims are padded
// with zeros: dim to dim_align, v_dim to 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minference/isa.h"
#include "minference/sparse_index.h"
#include "minference/tensor.h"

namespace minference::cpu {

inline constexpr std::int64_t kTileRows = 64;             // query rows of a row block
inline constexpr std::int64_t kTileKeys = 64;             // keys that are packed at a time
inline constexpr std::int64_t kKeyGranule = kRunGranule;  // packed keys are addressed in these
inline constexpr std::int64_t kBatchKeys = 128;  // keys that a row block attends to at a time
inline constexpr std::int64_t kPanelWidth = 16;  // keys, or columns, of one packed panel
inline constexpr std::int64_t kMaxLanes = 16;    // f32 lanes of the widest vector
// A row of a batch's probabilities, between as many zeros as the widest vector has lanes.
inline constexpr std::int64_t kProbabilityStride = kBatchKeys + 2 * kMaxLanes;
inline constexpr std::int64_t kValueAlign = 16;   // v_head_dim is padded to a multiple
inline constexpr std::int64_t kMaxHeadDim = 256;  // of q, k and of v

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Keys that a row block attends to in one step: granules of 32 packed keys and values.
struct KeyBatch {
  static constexpr std::int64_t kMaxGranules = kBatchKeys / kKeyGranule;

  std::int64_t granules = 0;
  const void* keys[kMaxGranules];
  const void* values[kMaxGranules];  // unused where only scores are computed
  bool masked = false;
  // Bit c of a row: key c of the batch is visible. Read only when `masked`.
  std::uint64_t mask[kTileRows][kBatchKeys / 64];

  void clear() {
    granules = 0;
    masked = false;
  }
  bool fits(std::int64_t n_keys) const { return granules * kKeyGranule + n_keys <= kBatchKeys; }
  const std::uint64_t* row_mask(std::int64_t row) const { return masked ? mask[row] : nullptr; }

  // Appends 32 or 64 keys, of which `rows` query rows see what `words` say, one word a row; null =
  // all. Granules lie key_bytes and value_bytes apart; first_value may be null.
  void add(const std::byte* first_key, std::int64_t key_bytes, const std::byte* first_value,
           std::int64_t value_bytes, std::int64_t n_keys, const std::uint64_t* words,
           std::int64_t rows);
};

// Online-softmax state and operands of one row block, in the caller's scratch memory. Scores are in
// log2 units: log2(e) is folded into the scale, so that exponentials are exp2.
struct RowBlock {
  std::int64_t rows = 0;   // valid rows, 1 ... kTileRows
  std::int64_t dim = 0;    // padded head_dim
  std::int64_t v_dim = 0;  // padded v_head_dim
  // c > 0: scores become c * tanh(score / c); given in log2 units like the scores.
  float soft_cap = 0.0F;
  // Factor on q.k, log2(e) included. It is applied to the f32 product, so that 16-bit queries are
  // multiplied as they are.
  float score_scale = 1.0F;
  void* q = nullptr;        // [kTileRows][dim] elements; rows past `rows` are zero
  float* scores = nullptr;  // [kTileRows][kBatchKeys]
  void* p = nullptr;        // [kTileRows][kBatchKeys] elements
  float* acc = nullptr;     // [kTileRows][v_dim] f32, unnormalised output
  // Exponentials are taken of score - shift[r]. The shift follows the running maximum only when
  // that exceeded bound[r]; any shift gives the same quotient, so the result stays exact.
  float* shift = nullptr;     // [kTileRows]
  float* bound = nullptr;     // [kTileRows], -inf before the first visible key
  float* lane_sum = nullptr;  // [kTileRows][kMaxLanes], partial sums of the exponentials
};

struct KernelTable {
  IsaLevel level;
  std::int64_t element_size;  // bytes of a packed element: 2 (bf16) or 4 (f32)
  std::int64_t dim_align;     // head_dim is padded to a multiple of this

  // Claims and releases per-thread machine state (AMX tiles); called around each task.
  void (*enter)();
  void (*leave)();

  // Packs rows[0 ... n) of `dim` elements each; fills up with zero keys to a multiple of 32, n <= 64.
  void (*pack_keys)(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                    std::int64_t padded_dim, void* packed);
  void (*pack_values)(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                      std::int64_t padded_dim, void* packed);
  // Writes kTileRows rows; those past n are zero.
  void (*load_queries)(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                       std::int64_t padded_dim, void* packed);

  // sums[d] = the sum of element d of rows[0 ... n), in f32.
  void (*sum_rows)(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                   float* sums);

  // Rounds one f32 row to packed elements, filled up with zeros; any length.
  void (*convert_row)(const float* row, std::int64_t n, std::int64_t padded_n, void* out);
  // c[rows][16 * panels] = sum over blocks of a[block][rows][depth] * b[block] (+ c), each b[block]
  // packed by pack_keys() with depth elements a key. rows <= kTileRows; a and c must have whole tiles
  // of 16 rows allocated. Strides are in elements.
  void (*gemm)(const void* a, std::int64_t a_block_stride, std::int64_t rows, const void* const* b,
               std::int64_t n_blocks, std::int64_t depth, std::int64_t panels, float* c,
               std::int64_t c_stride, bool accumulate);

  // Empties the state of a row block.
  void (*reset)(RowBlock& block);
  // Adds a batch of keys to several row blocks of the same shape.
  void (*attend)(RowBlock* const* blocks, std::int64_t n_blocks, const KeyBatch& keys);
  // As attend without values: only shift, bound and lane_sum are advanced.
  void (*sum_exponentials)(RowBlock& block, const KeyBatch& keys);
  // As sum_exponentials; sums[r] receives what the batch adds to row r, relative to shift[r] as it
  // is afterwards: [0] by the keys whose bit is set in part[r] (as KeyBatch::mask), [1] by the others.
  void (*split_exponentials)(RowBlock& block, const KeyBatch& keys,
                             const std::uint64_t (*part)[kBatchKeys / 64], float (*sums)[2]);
  // Probabilities 2^(score - log_sum[r]) of a batch, 0 where masked, [rows][kProbabilityStride]: the
  // first key's stands at kMaxLanes, with zeros before it and behind the last.
  void (*probabilities)(RowBlock& block, const KeyBatch& keys, const float* log_sum,
                        float* probabilities);
  // Turns block.scores, as gemm() left them [rows][kBatchKeys], into exponentials
  // 2^(score - shift[r]), 0 where `keys` masks; of `keys` only granules and masks are read.
  // Advances shift, bound and lane_sum. group_sums [kBatchKeys / kMaxLanes] of a row receive the sums
  // of kMaxLanes exponentials each; null: block.scores receives the exponentials themselves.
  void (*exponentials)(RowBlock& block, const KeyBatch& keys,
                       float (*group_sums)[kBatchKeys / kMaxLanes]);
  // Adds probabilities() of a batch of n_keys, a multiple of 32, to its column sums,
  // column_sums[c] += p[r][c].
  void (*add_columns)(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                      float* column_sums);
  // Adds row r's keys of each granule to kMaxLanes partial sums: those of the first granule stand at
  // lanes[r], those of the next before them.
  void (*add_granules)(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                       float* const* lanes);
  // As add_columns(); also to the diagonal sums, diagonal_sums[c - r] += p[r][c] for c - r from
  // 1 - rows to n_keys - 1; up to kMaxLanes - 1 sums behind those are rewritten unchanged.
  void (*add_sums)(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                   float* column_sums, float* diagonal_sums);
  // Sum of the lanes of row r.
  float (*row_sum)(const RowBlock& block, std::int64_t r);
};

// The table of a compiled level, null when the level is not compiled in.
const KernelTable* kernel_table(IsaLevel level);

// True when this processor and kernel run the level; defined for every level on every platform.
bool cpu_supports(IsaLevel level);

// False when this processor runs the level, but a lower one faster; chosen then only by force.
bool cpu_prefers(IsaLevel level);

}  // namespace minference::cpu
