// Reading llama.cpp's attention mask: which rows are causal, over which keys, and which are not.
//
// The mask is all that an operation knows about positions. llama.cpp writes 0 for "visible" and
// -inf for "hidden" and nothing else. In a context with one sequence each row is a prefix of the
// cache; with several sequences in one cache, removed or shifted ranges or sliding windows it need
// not be.
#pragma once

#include <cstdint>
#include <vector>

namespace minference::llama_host {

// An f16 mask, [rows, keys], rows row_stride elements apart.
struct MaskView {
  const std::uint16_t* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t keys = 0;
  std::int64_t row_stride = 0;
};

// Consecutive rows that one call of attention() serves. No row sees a key outside
// [key_begin, key_end).
struct RowRun {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  // Row first_row + i sees exactly the keys [key_begin, key_end - rows + 1 + i): the causal rule
  // over the keys from key_begin on. False: only the mask itself says what is visible.
  bool causal = false;
};

// Splits the rows into runs, as few as possible, in order, covering every row. Throws Unsupported
// naming row, key and value when the mask holds anything else than 0 and -inf.
std::vector<RowRun> read_mask(const MaskView& mask, int threads);

// The visibility of a run's rows as bits, [run.rows, ceil((key_end - key_begin) / 64)], key
// key_begin + j at bit j % 64 of word j / 64.
std::vector<std::uint64_t> mask_bits(const MaskView& mask, const RowRun& run, int threads);

}  // namespace minference::llama_host
