// The tile loop of every ISA level, written once: GEMM panels, masking, online softmax, packing.
//
// An ISA body supplies a `Vec` trait (vec_*.h) and instantiates make_kernel_table<>() in a file of its
// own that is compiled with that ISA's flags. Nothing here may be instantiated elsewhere, or code of
// one ISA could be linked into another.
//
// Identity implemented (online softmax): for any shifts s_t, sum_t 2^(x_t - s) v_t with a common s
// equals the running sum that is multiplied by 2^(s_old - s_new) whenever the shift changes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/cpu/kernel_table.h"

namespace minference::cpu {

// A packed right-hand operand: panels of 16 columns, each a sequence of k-steps (pairs or single
// elements), possibly cut into blocks along k. Strides are in elements.
struct PanelLayout {
  std::int64_t panels;
  std::int64_t panel_stride;
  std::int64_t steps;  // k-steps per block
  std::int64_t blocks;
  std::int64_t block_stride;
};

// Rescaling is put off until a score exceeds the shift by this many octaves: exponentials stay below
// 2^8, far from overflow, and most tiles leave the accumulator alone.
inline constexpr float kShiftSlack = 8.0F;

// C[rows, 16 * panels] = A[rows, k] * B (+ C), A row-major, in registers of Isa::kGemmRows x
// Isa::kGemmPanels panels.
template <class Isa>
struct VectorGemm {
  using Vec = typename Isa::Vec;
  using Elem = typename Isa::Elem;
  static constexpr std::int64_t kVecs = kPanelWidth / Isa::kLanes;  // vectors of one panel

  template <int kRows, int kPanels>
  static void micro(const Elem* a, std::int64_t lda, const Elem* b, const PanelLayout& layout,
                    float* c, std::int64_t ldc, bool accumulate) {
    constexpr int kCols = kPanels * static_cast<int>(kVecs);
    Vec sum[kRows][kCols];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kCols; ++j) {
        sum[i][j] = accumulate ? Isa::load(c + i * ldc + j * Isa::kLanes) : Isa::zero();
      }
    }
    for (std::int64_t block = 0; block < layout.blocks; ++block) {
      const Elem* block_b = b + block * layout.block_stride;
      const Elem* block_a = a + block * layout.steps * Isa::kPair;
      for (std::int64_t step = 0; step < layout.steps; ++step) {
        typename Isa::Operand columns[kCols];
        for (int j = 0; j < kCols; ++j) {
          columns[j] =
              Isa::load_operand(block_b + (j / kVecs) * layout.panel_stride +
                                (step * kPanelWidth + (j % kVecs) * Isa::kLanes) * Isa::kPair);
        }
        for (int i = 0; i < kRows; ++i) {
          const typename Isa::Operand row = Isa::broadcast(block_a + i * lda + step * Isa::kPair);
          for (int j = 0; j < kCols; ++j) sum[i][j] = Isa::dot(sum[i][j], row, columns[j]);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kCols; ++j) Isa::store(c + i * ldc + j * Isa::kLanes, sum[i][j]);
    }
  }

  template <int kPanels>
  static void all_rows(const Elem* a, std::int64_t lda, std::int64_t rows, const Elem* b,
                       const PanelLayout& layout, float* c, std::int64_t ldc, bool accumulate) {
    std::int64_t i = 0;
    for (; i + Isa::kGemmRows <= rows; i += Isa::kGemmRows) {
      micro<Isa::kGemmRows, kPanels>(a + i * lda, lda, b, layout, c + i * ldc, ldc, accumulate);
    }
    for (; i + 2 <= rows; i += 2) {
      micro<2, kPanels>(a + i * lda, lda, b, layout, c + i * ldc, ldc, accumulate);
    }
    if (i < rows) micro<1, kPanels>(a + i * lda, lda, b, layout, c + i * ldc, ldc, accumulate);
  }

  static void gemm(const Elem* a, std::int64_t lda, std::int64_t rows, const Elem* b,
                   const PanelLayout& layout, float* c, std::int64_t ldc, bool accumulate) {
    std::int64_t panel = 0;
    for (; panel + Isa::kGemmPanels <= layout.panels; panel += Isa::kGemmPanels) {
      all_rows<Isa::kGemmPanels>(a, lda, rows, b + panel * layout.panel_stride, layout,
                                 c + panel * kPanelWidth, ldc, accumulate);
    }
    for (; panel < layout.panels; ++panel) {
      all_rows<1>(a, lda, rows, b + panel * layout.panel_stride, layout, c + panel * kPanelWidth,
                  ldc, accumulate);
    }
  }
};

template <class Isa>
struct TileKernels {
  using Vec = typename Isa::Vec;
  using Elem = typename Isa::Elem;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  // ---- packing -------------------------------------------------------------------------------

  // Converts one row to f32, padded with zeros.
  static void convert_row(const void* row, DType dtype, std::int64_t dim, std::int64_t padded_dim,
                          float* out) {
    std::int64_t i = 0;
    for (; i + Isa::kLanes <= dim; i += Isa::kLanes) {
      Isa::store(out + i, Isa::load_as_f32(row, dtype, i));
    }
    for (; i < dim; ++i) out[i] = Isa::element_as_f32(row, dtype, i);
    for (; i < padded_dim; ++i) out[i] = 0.0F;
  }

  static void pack_keys(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                        std::int64_t padded_dim, void* packed) {
    alignas(64) float row[kMaxHeadDim];
    alignas(64) Elem block[kPanelWidth * kMaxHeadDim + 2 * kPanelWidth];
    auto* out = static_cast<Elem*>(packed);
    const std::int64_t padded_n = round_up(n, kKeyGranule);
    for (std::int64_t key = 0; key < padded_n; key += kPanelWidth) {
      for (std::int64_t i = 0; i < kPanelWidth; ++i) {
        Elem* to = block + i * padded_dim;
        if (key + i < n) {
          convert_row(rows[key + i], dtype, dim, padded_dim, row);
          Isa::to_elements(row, padded_dim, to);
        } else {
          std::memset(to, 0, static_cast<std::size_t>(padded_dim) * sizeof(Elem));
        }
      }
      // A pair of bf16 and a single f32 are both 32 bits: one transposition serves both.
      Isa::transpose_16(block, padded_dim, out + key * padded_dim);
    }
  }

  static void pack_values(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                          std::int64_t padded_dim, void* packed) {
    alignas(64) float pair[Isa::kPair][kMaxHeadDim];
    auto* out = static_cast<Elem*>(packed);
    const std::int64_t padded_n = round_up(n, kKeyGranule);
    for (std::int64_t key = 0; key < padded_n; key += Isa::kPair) {
      for (std::int64_t i = 0; i < Isa::kPair; ++i) {
        if (key + i < n) {
          convert_row(rows[key + i], dtype, dim, padded_dim, pair[i]);
        } else {
          std::fill(pair[i], pair[i] + padded_dim, 0.0F);
        }
      }
      Elem* block = out + key / kKeyGranule * kKeyGranule * padded_dim;
      const std::int64_t step = key % kKeyGranule;
      for (std::int64_t d = 0; d < padded_dim; d += kPanelWidth) {
        Isa::interleave_16(&pair[0][d], &pair[Isa::kPair - 1][d],
                           block + d * kKeyGranule + step * kPanelWidth);
      }
    }
  }

  static void load_queries(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                           std::int64_t padded_dim, void* packed) {
    alignas(64) float row[kMaxHeadDim];
    auto* out = static_cast<Elem*>(packed);
    for (std::int64_t r = 0; r < n; ++r) {
      convert_row(rows[r], dtype, dim, padded_dim, row);
      Isa::to_elements(row, padded_dim, out + r * padded_dim);
    }
    std::memset(out + n * padded_dim, 0,
                static_cast<std::size_t>((kTileRows - n) * padded_dim) * sizeof(Elem));
  }

  static void convert_f32_row(const float* row, std::int64_t n, std::int64_t padded_n, void* out) {
    auto* to = static_cast<Elem*>(out);
    const std::int64_t whole = n / kPanelWidth * kPanelWidth;
    Isa::to_elements(row, whole, to);
    for (std::int64_t i = whole; i < padded_n; i += kPanelWidth) {
      alignas(64) float edge[kPanelWidth] = {};
      for (std::int64_t j = i; j < n && j < i + kPanelWidth; ++j) edge[j - i] = row[j];
      Isa::to_elements(edge, kPanelWidth, to + i);
    }
  }

  static void gemm(const void* a, std::int64_t a_stride, std::int64_t rows, const void* b,
                   std::int64_t panels, std::int64_t chunk, std::int64_t chunks,
                   std::int64_t packed_keys, float* c, std::int64_t c_stride, bool accumulate) {
    const PanelLayout layout{panels, kPanelWidth * chunk, chunk / Isa::kPair, chunks,
                             chunk * packed_keys};
    Isa::gemm(static_cast<const Elem*>(a), a_stride, rows, static_cast<const Elem*>(b), layout, c,
              c_stride, accumulate);
  }

  // ---- softmax -------------------------------------------------------------------------------

  static void reset(RowBlock& block) {
    std::fill(block.shift, block.shift + kTileRows, 0.0F);
    std::fill(block.bound, block.bound + kTileRows, -kInfinity);
    std::fill(block.lane_sum, block.lane_sum + kTileRows * kMaxLanes, 0.0F);
    if (block.acc != nullptr) std::fill(block.acc, block.acc + kTileRows * block.v_dim, 0.0F);
  }

  static void compute_scores(const RowBlock& block, const void* keys, std::int64_t n_keys) {
    const PanelLayout layout{n_keys / kPanelWidth, kPanelWidth * block.dim, block.dim / Isa::kPair,
                             1, 0};
    Isa::gemm(static_cast<const Elem*>(block.q), block.dim, block.rows,
              static_cast<const Elem*>(keys), layout, block.scores, kTileKeys, false);
  }

  // c * tanh(s / c) = c - 2 c / (e^(2 s / c) + 1), with every quantity in log2 units.
  static Vec soft_cap(Vec score, float cap) {
    constexpr float kTwoLog2E = 2.885390081777927F;
    const Vec e = Isa::exp2_exact(Isa::mul(score, Isa::set1(kTwoLog2E / cap)));
    return Isa::sub(Isa::set1(cap), Isa::div(Isa::set1(2.0F * cap), Isa::add(e, Isa::set1(1.0F))));
  }

  // Loads a row of scores, scales, caps and masks it.
  template <int kVecs>
  static void load_scores(const RowBlock& block, std::int64_t r, const std::uint64_t* mask,
                          Vec (&score)[kVecs]) {
    const float* row = block.scores + r * kTileKeys;
    const Vec scale = Isa::set1(block.score_scale);
    for (int v = 0; v < kVecs; ++v) {
      score[v] = Isa::mul(Isa::load(row + v * Isa::kLanes), scale);
    }
    if (block.soft_cap > 0.0F) {
      for (int v = 0; v < kVecs; ++v) score[v] = soft_cap(score[v], block.soft_cap);
    }
    if (mask != nullptr) {
      for (int v = 0; v < kVecs; ++v) {
        score[v] = Isa::keep_or_minus_infinity(score[v], mask[r] >> (v * Isa::kLanes));
      }
    }
  }

  // Moves the shift of row r up to `maximum`.
  static void raise_shift(RowBlock& block, std::int64_t r, float maximum) {
    if (block.bound[r] != -kInfinity) {
      const Vec factor = Isa::set1(std::exp2(block.shift[r] - maximum));
      float* sums = block.lane_sum + r * kMaxLanes;
      Isa::store(sums, Isa::mul(Isa::load(sums), factor));
      if (block.acc != nullptr) {
        float* acc = block.acc + r * block.v_dim;
        for (std::int64_t d = 0; d < block.v_dim; d += Isa::kLanes) {
          Isa::store(acc + d, Isa::mul(Isa::load(acc + d), factor));
        }
      }
    }
    block.shift[r] = maximum;
    block.bound[r] = maximum + kShiftSlack;
  }

  template <int kVecs, bool kStoreP>
  static void softmax_rows(RowBlock& block, const std::uint64_t* mask) {
    for (std::int64_t r = 0; r < block.rows; ++r) {
      Vec score[kVecs];
      load_scores(block, r, mask, score);
      Vec largest = score[0];
      for (int v = 1; v < kVecs; ++v) largest = Isa::max(largest, score[v]);
      if (Isa::any_above(largest, block.bound[r])) raise_shift(block, r, Isa::reduce_max(largest));
      const Vec shift = Isa::set1(block.shift[r]);
      float* sums = block.lane_sum + r * kMaxLanes;
      Vec sum = Isa::load(sums);
      for (int v = 0; v < kVecs; ++v) {
        score[v] = Isa::exp2(Isa::sub(score[v], shift));
        sum = Isa::add(sum, score[v]);
      }
      Isa::store(sums, sum);
      if constexpr (kStoreP) {
        Elem* p = static_cast<Elem*>(block.p) + r * kTileKeys;
        Isa::template store_elements<kVecs>(score, p);
      }
    }
  }

  template <bool kStoreP>
  static void softmax(RowBlock& block, std::int64_t n_keys, const std::uint64_t* mask) {
    if (n_keys == kTileKeys) {
      softmax_rows<kTileKeys / Isa::kLanes, kStoreP>(block, mask);
    } else {
      softmax_rows<kKeyGranule / Isa::kLanes, kStoreP>(block, mask);
    }
  }

  static void attend(RowBlock& block, const void* keys, const void* values, std::int64_t n_keys,
                     const std::uint64_t* mask) {
    compute_scores(block, keys, n_keys);
    softmax<true>(block, n_keys, mask);
    const PanelLayout layout{block.v_dim / kPanelWidth, kKeyGranule * kPanelWidth,
                             kKeyGranule / Isa::kPair, n_keys / kKeyGranule,
                             kKeyGranule * block.v_dim};
    Isa::gemm(static_cast<const Elem*>(block.p), kTileKeys, block.rows,
              static_cast<const Elem*>(values), layout, block.acc, block.v_dim, true);
  }

  static void sum_exponentials(RowBlock& block, const void* keys, std::int64_t n_keys,
                               const std::uint64_t* mask) {
    compute_scores(block, keys, n_keys);
    softmax<false>(block, n_keys, mask);
  }

  static float row_sum(const RowBlock& block, std::int64_t r) {
    return Isa::reduce_add(Isa::load(block.lane_sum + r * kMaxLanes));
  }

  // ---- estimation ----------------------------------------------------------------------------

  template <int kVecs>
  static void probability_rows(const RowBlock& block, const std::uint64_t* mask,
                               const float* log_sum, float* probabilities) {
    for (std::int64_t r = 0; r < block.rows; ++r) {
      Vec score[kVecs];
      load_scores(block, r, mask, score);
      const Vec shift = Isa::set1(log_sum[r]);
      for (int v = 0; v < kVecs; ++v) {
        Isa::store(probabilities + r * kTileKeys + v * Isa::kLanes,
                   Isa::exp2(Isa::sub(score[v], shift)));
      }
    }
  }

  static void probabilities(RowBlock& block, const void* keys, std::int64_t n_keys,
                            const std::uint64_t* mask, const float* log_sum, float* probabilities) {
    compute_scores(block, keys, n_keys);
    if (n_keys == kTileKeys) {
      probability_rows<kTileKeys / Isa::kLanes>(block, mask, log_sum, probabilities);
    } else {
      probability_rows<kKeyGranule / Isa::kLanes>(block, mask, log_sum, probabilities);
    }
  }

  template <int kVecs>
  static void add_sums_rows(const float* probabilities, std::int64_t rows, float* column_sums,
                            float* diagonal_sums) {
    Vec columns[kVecs];
    for (int v = 0; v < kVecs; ++v) columns[v] = Isa::load(column_sums + v * Isa::kLanes);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* diagonal = diagonal_sums - r;
      for (int v = 0; v < kVecs; ++v) {
        const Vec p = Isa::load(probabilities + r * kTileKeys + v * Isa::kLanes);
        columns[v] = Isa::add(columns[v], p);
        float* to = diagonal + v * Isa::kLanes;
        Isa::store(to, Isa::add(Isa::load(to), p));
      }
    }
    for (int v = 0; v < kVecs; ++v) Isa::store(column_sums + v * Isa::kLanes, columns[v]);
  }

  static void add_sums(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                       float* column_sums, float* diagonal_sums) {
    if (n_keys == kTileKeys) {
      add_sums_rows<kTileKeys / Isa::kLanes>(probabilities, rows, column_sums, diagonal_sums);
    } else {
      add_sums_rows<kKeyGranule / Isa::kLanes>(probabilities, rows, column_sums, diagonal_sums);
    }
  }
};

template <class Isa>
KernelTable make_kernel_table(IsaLevel level) {
  using Kernels = TileKernels<Isa>;
  return {level,
          static_cast<std::int64_t>(sizeof(typename Isa::Elem)),
          Isa::kDimAlign,
          Isa::enter,
          Isa::leave,
          Kernels::pack_keys,
          Kernels::pack_values,
          Kernels::load_queries,
          Kernels::convert_f32_row,
          Kernels::gemm,
          Kernels::reset,
          Kernels::attend,
          Kernels::sum_exponentials,
          Kernels::probabilities,
          Kernels::add_sums,
          Kernels::row_sum};
}

}  // namespace minference::cpu
