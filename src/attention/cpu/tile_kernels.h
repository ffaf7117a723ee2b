// The tile loop of every ISA level, written once: packing, masking, online softmax, estimation.
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
#include <utility>

#include "attention/cpu/kernel_table.h"
#include "attention/cpu/vector_gemm.h"

namespace minference::cpu {

// Rescaling is put off until a score exceeds the shift by this many octaves: exponentials stay below
// 2^8, far from overflow, and most tiles leave the accumulator alone.
inline constexpr float kShiftSlack = 8.0F;

template <class Isa>
struct TileKernels {
  using Vec = typename Isa::Vec;
  using Elem = typename Isa::Elem;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr std::int64_t kGranulePanels = kKeyGranule / kPanelWidth;
  static constexpr std::int64_t kStepDepth = 16 * Isa::kPair;  // of a matrix unit's step
  static constexpr int kGranuleVecs = static_cast<int>(kKeyGranule / Isa::kLanes);

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
      if constexpr (requires { Isa::kPackDepth; }) {
        if (key + kPanelWidth <= n && dim == padded_dim && dim % Isa::kPackDepth == 0) {
          Isa::pack_panel(rows + key, dtype, dim, out + key * dim);
          continue;
        }
      }
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

  static void sum_rows(const void* const* rows, DType dtype, std::int64_t n, std::int64_t dim,
                       float* sums) {
    std::int64_t d = 0;
    for (; d + Isa::kLanes <= dim; d += Isa::kLanes) {
      Vec sum[2] = {Isa::zero(), Isa::zero()};
      for (std::int64_t r = 0; r < n; ++r) {
        sum[r % 2] = Isa::add(sum[r % 2], Isa::load_as_f32(rows[r], dtype, d));
      }
      Isa::store(sums + d, Isa::add(sum[0], sum[1]));
    }
    for (; d < dim; ++d) {
      float sum = 0.0F;
      for (std::int64_t r = 0; r < n; ++r) sum += Isa::element_as_f32(rows[r], dtype, d);
      sums[d] = sum;
    }
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

  static void gemm(const void* a, std::int64_t a_block_stride, std::int64_t rows,
                   const void* const* blocks, std::int64_t n_blocks, std::int64_t depth,
                   std::int64_t panels, float* c, std::int64_t c_stride, bool accumulate) {
    Isa::gemm({static_cast<const Elem*>(a), depth, a_block_stride}, rows,
              {blocks, n_blocks, depth / Isa::kPair, panels, kPanelWidth * depth}, c, c_stride,
              accumulate);
  }

  // ---- softmax -------------------------------------------------------------------------------

  static void reset(RowBlock& block) {
    std::fill(block.shift, block.shift + kTileRows, 0.0F);
    std::fill(block.bound, block.bound + kTileRows, -kInfinity);
    std::fill(block.lane_sum, block.lane_sum + kTileRows * kMaxLanes, 0.0F);
    if (block.acc != nullptr) std::fill(block.acc, block.acc + kTileRows * block.v_dim, 0.0F);
  }

  // Rows that are taken through scores, softmax and product together, so that their scores stay in
  // the first-level cache.
  struct Strip {
    std::int64_t begin;
    std::int64_t rows;
  };

  template <class Visit>
  static void for_each_strip(const RowBlock& block, Visit&& visit) {
    for (std::int64_t row = 0; row < block.rows; row += Isa::kStripRows) {
      visit(Strip{row, std::min(Isa::kStripRows, block.rows - row)});
    }
  }

  // Raw scores of a strip and one granule; `scores`: those of the strip.
  static void score_granule(const RowBlock& block, const KeyBatch& keys, Strip strip,
                            std::int64_t g, float* scores) {
    const Elem* q = static_cast<const Elem*>(block.q) + strip.begin * block.dim;
    Isa::gemm({q, block.dim, 0}, strip.rows,
              {keys.keys + g, 1, block.dim / Isa::kPair, kKeyGranule / kPanelWidth,
               kPanelWidth * block.dim},
              scores + g * kKeyGranule, kBatchKeys, false);
  }

  static void compute_scores(const RowBlock& block, const KeyBatch& keys, Strip strip) {
    for (std::int64_t g = 0; g < keys.granules; ++g) {
      score_granule(block, keys, strip, g, block.scores);
    }
  }

  // c * tanh(s / c) = c - 2 c / (e^(2 s / c) + 1), with every quantity in log2 units.
  static Vec soft_cap(Vec score, float cap) {
    constexpr float kTwoLog2E = 2.885390081777927F;
    const Vec e = Isa::exp2_exact(Isa::mul(score, Isa::set1(kTwoLog2E / cap)));
    return Isa::sub(Isa::set1(cap), Isa::div(Isa::set1(2.0F * cap), Isa::add(e, Isa::set1(1.0F))));
  }

  // Scales, caps and masks a row of scores in place; returns their lane-wise maximum.
  static Vec finish_scores(const RowBlock& block, std::int64_t granules, const std::uint64_t* mask,
                           float* row) {
    const Vec scale = Isa::set1(block.score_scale);
    Vec largest = Isa::set1(-kInfinity);
    for (std::int64_t g = 0; g < granules; ++g) {
      for (int v = 0; v < kGranuleVecs; ++v) {
        const std::int64_t i = g * kKeyGranule + v * Isa::kLanes;
        Vec score = Isa::mul(Isa::load(row + i), scale);
        if (block.soft_cap > 0.0F) score = soft_cap(score, block.soft_cap);
        if (mask != nullptr) score = Isa::keep_or_minus_infinity(score, mask[i / 64] >> (i % 64));
        Isa::store(row + i, score);
        largest = Isa::max(largest, score);
      }
    }
    return largest;
  }

  // The lane-wise maximum of a row of scores as the product left them, scaled.
  static Vec largest_raw(const RowBlock& block, std::int64_t granules, const float* row) {
    Vec largest[2] = {Isa::load(row), Isa::load(row + Isa::kLanes)};
    for (std::int64_t i = 2 * Isa::kLanes; i < granules * kKeyGranule; i += 2 * Isa::kLanes) {
      largest[0] = Isa::max(largest[0], Isa::load(row + i));
      largest[1] = Isa::max(largest[1], Isa::load(row + i + Isa::kLanes));
    }
    return Isa::mul(Isa::max(largest[0], largest[1]), Isa::set1(block.score_scale));
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

  // Whether scores can be used as the product left them, with their scale applied on the way. The
  // largest raw score is the largest score only when the scale is positive.
  static bool scores_stay_raw(const RowBlock& block, const KeyBatch& keys) {
    return !keys.masked && block.soft_cap <= 0.0F && block.score_scale > 0.0F;
  }

  // One row's exponentials and their sum. kRaw: scores are as the product left them and get their
  // scale on the way, which costs nothing.
  template <bool kRaw, bool kStoreP>
  static void softmax_row(RowBlock& block, std::int64_t r, Vec largest, const float* scores,
                          std::int64_t granules, Elem* p) {
    if (Isa::any_above(largest, block.bound[r])) raise_shift(block, r, Isa::reduce_max(largest));
    const Vec scale = Isa::set1(block.score_scale);
    const Vec shift = Isa::set1(-block.shift[r]);
    float* sums = block.lane_sum + r * kMaxLanes;
    Vec sum[2] = {Isa::load(sums), Isa::zero()};
    for (std::int64_t g = 0; g < granules; ++g) {
      Vec e[kGranuleVecs];
      for (int v = 0; v < kGranuleVecs; ++v) {
        const Vec score = Isa::load(scores + g * kKeyGranule + v * Isa::kLanes);
        e[v] = Isa::exp2(kRaw ? Isa::fma(score, scale, shift) : Isa::add(score, shift));
        sum[v % 2] = Isa::add(sum[v % 2], e[v]);
      }
      if constexpr (kStoreP) Isa::template store_elements<kGranuleVecs>(e, p + g * kKeyGranule);
    }
    Isa::store(sums, Isa::add(sum[0], sum[1]));
  }

  template <bool kStoreP>
  static void softmax(RowBlock& block, const KeyBatch& keys, Strip strip, float* scores, Elem* p) {
    const bool raw = scores_stay_raw(block, keys);
    for (std::int64_t i = 0; i < strip.rows; ++i) {
      const std::int64_t r = strip.begin + i;
      if (raw) {
        softmax_row<true, kStoreP>(block, r, largest_raw(block, keys.granules, scores), scores,
                                   keys.granules, p);
      } else {
        softmax_row<false, kStoreP>(block, r,
                                    finish_scores(block, keys.granules, keys.row_mask(r), scores),
                                    scores, keys.granules, p);
      }
      scores += kBatchKeys;
      if constexpr (kStoreP) p += kBatchKeys;
    }
  }

  static void attend(RowBlock* const* blocks, std::int64_t n_blocks, const KeyBatch& keys) {
    if constexpr (Isa::kMatrixUnit) {
      attend_in_turns(blocks, n_blocks, keys);
    } else {
      for (std::int64_t i = 0; i < n_blocks; ++i) {
        RowBlock& block = *blocks[i];
        for_each_strip(block, [&](Strip strip) {
          Elem* p = static_cast<Elem*>(block.p);
          compute_scores(block, keys, strip);
          softmax<true>(block, keys, strip, block.scores, p);
          Isa::gemm({p, kBatchKeys, kKeyGranule}, strip.rows,
                    {keys.values, keys.granules, kKeyGranule / Isa::kPair,
                     block.v_dim / kPanelWidth, kKeyGranule * kPanelWidth},
                    block.acc + strip.begin * block.v_dim, block.v_dim, true);
        });
      }
    }
  }

  // Calls visit(std::make_integer_sequence<int, n>) for the smaller of kMost and `wanted`.
  template <int kMost, class Visit>
  static void with_steps(std::int64_t wanted, Visit&& visit) {
    if constexpr (kMost > 1) {
      if (wanted < kMost) return with_steps<kMost - 1>(wanted, visit);
    }
    visit(std::make_integer_sequence<int, kMost>());
  }

  // Raw scores of a matrix unit's strip.
  static void strip_scores(const RowBlock& block, const KeyBatch& keys, std::int64_t row,
                           float* scores) {
    const Elem* q = static_cast<const Elem*>(block.q) + row * block.dim;
    const std::int64_t steps = block.dim / kStepDepth;
    for (std::int64_t first = 0; first < steps; first += Isa::kStripSteps) {
      const auto tile_at = [&](std::int64_t panel, std::int64_t step) {
        return static_cast<const Elem*>(keys.keys[panel / kGranulePanels]) +
               panel % kGranulePanels * kPanelWidth * block.dim +
               (first + step) * kStepDepth * kPanelWidth;
      };
      with_steps<Isa::kStripSteps>(steps - first, [&](auto some) {
        Isa::strip_product(q + first * kStepDepth, block.dim, keys.granules * kGranulePanels,
                           tile_at, scores, kBatchKeys, first > 0, some);
      });
    }
  }

  // Adds the product of a strip's probabilities and the values to its accumulators.
  static void strip_values(RowBlock& block, const KeyBatch& keys, std::int64_t row, const Elem* p) {
    static_assert(KeyBatch::kMaxGranules <= Isa::kStripSteps && kKeyGranule == kStepDepth);
    const auto tile_at = [&](std::int64_t panel, std::int64_t granule) {
      return static_cast<const Elem*>(keys.values[granule]) + panel * kKeyGranule * kPanelWidth;
    };
    with_steps<KeyBatch::kMaxGranules>(keys.granules, [&](auto granules) {
      Isa::strip_product(p, kBatchKeys, block.v_dim / kPanelWidth, tile_at,
                         block.acc + row * block.v_dim, block.v_dim, true, granules);
    });
  }

  // The products of a matrix unit read and write memory that the vector units must wait for, and
  // the other way round. So a strip's scores are made one strip ahead of its softmax, and its
  // probabilities multiplied one strip behind; two strips' are alive at a time. Finer mixing of the
  // two kinds of work gained nothing.
  static void attend_in_turns(RowBlock* const* blocks, std::int64_t n_blocks,
                              const KeyBatch& keys) {
    constexpr std::int64_t kRows = Isa::kStripRows;
    const std::int64_t block_rows = blocks[0]->rows;
    const std::int64_t block_strips = (block_rows + kRows - 1) / kRows;
    const std::int64_t strips = block_strips * n_blocks;
    const auto block = [&](std::int64_t s) -> RowBlock& { return *blocks[s / block_strips]; };
    const auto row = [&](std::int64_t s) { return s % block_strips * kRows; };
    const auto scores = [&](std::int64_t s) {
      return blocks[0]->scores + s % 2 * kRows * kBatchKeys;
    };
    const auto p = [&](std::int64_t s) {
      return static_cast<Elem*>(blocks[0]->p) + s % 2 * kRows * kBatchKeys;
    };
    strip_scores(block(0), keys, row(0), scores(0));
    for (std::int64_t s = 0; s < strips; ++s) {
      if (s + 1 < strips) strip_scores(block(s + 1), keys, row(s + 1), scores(s + 1));
      if (s > 0) strip_values(block(s - 1), keys, row(s - 1), p(s - 1));
      softmax<true>(block(s), keys, {row(s), std::min(kRows, block_rows - row(s))}, scores(s),
                    p(s));
    }
    strip_values(block(strips - 1), keys, row(strips - 1), p(strips - 1));
  }

  static void sum_exponentials(RowBlock& block, const KeyBatch& keys) {
    for_each_strip(block, [&](Strip strip) {
      compute_scores(block, keys, strip);
      softmax<false>(block, keys, strip, block.scores, nullptr);
    });
  }

  // One row's exponentials, summed inside and outside of `part`; kRaw as in softmax_row.
  template <bool kRaw>
  static void split_row(RowBlock& block, std::int64_t r, Vec largest, const float* scores,
                        std::int64_t granules, const std::uint64_t* part, float* sums) {
    if (Isa::any_above(largest, block.bound[r])) raise_shift(block, r, Isa::reduce_max(largest));
    const Vec scale = Isa::set1(block.score_scale);
    const Vec shift = Isa::set1(-block.shift[r]);
    Vec inside = Isa::zero();
    Vec outside = Isa::zero();
    for (std::int64_t i = 0; i < granules * kKeyGranule; i += Isa::kLanes) {
      const Vec score = Isa::load(scores + i);
      const Vec e = Isa::exp2(kRaw ? Isa::fma(score, scale, shift) : Isa::add(score, shift));
      const Vec kept = Isa::keep_or_zero(e, part[i / 64] >> (i % 64));
      inside = Isa::add(inside, kept);
      outside = Isa::add(outside, Isa::sub(e, kept));
    }
    float* lanes = block.lane_sum + r * kMaxLanes;
    Isa::store(lanes, Isa::add(Isa::load(lanes), Isa::add(inside, outside)));
    sums[0] = Isa::reduce_add(inside);
    sums[1] = Isa::reduce_add(outside);
  }

  static void split_exponentials(RowBlock& block, const KeyBatch& keys,
                                 const std::uint64_t (*part)[kBatchKeys / 64], float (*sums)[2]) {
    const bool raw = scores_stay_raw(block, keys);
    for_each_strip(block, [&](Strip strip) {
      compute_scores(block, keys, strip);
      for (std::int64_t i = 0; i < strip.rows; ++i) {
        const std::int64_t r = strip.begin + i;
        float* scores = block.scores + i * kBatchKeys;
        if (raw) {
          split_row<true>(block, r, largest_raw(block, keys.granules, scores), scores,
                          keys.granules, part[r], sums[r]);
        } else {
          const Vec largest = finish_scores(block, keys.granules, keys.row_mask(r), scores);
          split_row<false>(block, r, largest, scores, keys.granules, part[r], sums[r]);
        }
      }
    });
  }

  static float row_sum(const RowBlock& block, std::int64_t r) {
    return Isa::reduce_add(Isa::load(block.lane_sum + r * kMaxLanes));
  }

  // ---- estimation ----------------------------------------------------------------------------

  static void probabilities(RowBlock& block, const KeyBatch& keys, const float* log_sum,
                            float* probabilities) {
    const bool raw = !keys.masked && block.soft_cap <= 0.0F;
    const Vec scale = Isa::set1(block.score_scale);
    const std::int64_t n_keys = keys.granules * kKeyGranule;
    for_each_strip(block, [&](Strip strip) {
      compute_scores(block, keys, strip);
      for (std::int64_t i = 0; i < strip.rows; ++i) {
        const std::int64_t r = strip.begin + i;
        float* scores = block.scores + i * kBatchKeys;
        if (!raw) finish_scores(block, keys.granules, keys.row_mask(r), scores);
        const Vec shift = Isa::set1(-log_sum[r]);
        float* to = probabilities + r * kProbabilityStride + kMaxLanes;
        for (std::int64_t key = 0; key < n_keys; key += Isa::kLanes) {
          const Vec score = Isa::load(scores + key);
          Isa::store(to + key,
                     Isa::exp2(raw ? Isa::fma(score, scale, shift) : Isa::add(score, shift)));
        }
        for (std::int64_t pad = 0; pad < kMaxLanes; pad += Isa::kLanes) {
          Isa::store(to - kMaxLanes + pad, Isa::zero());
          Isa::store(to + n_keys + pad, Isa::zero());
        }
      }
    });
  }

  // One row of exponentials(); kRaw as in softmax_row.
  template <bool kRaw, bool kGroups>
  static void exponentials_row(RowBlock& block, std::int64_t r, Vec largest, float* scores,
                               std::int64_t granules, float* group_sums) {
    constexpr int kVecs = static_cast<int>(kMaxLanes / Isa::kLanes);  // of a group
    if (Isa::any_above(largest, block.bound[r])) raise_shift(block, r, Isa::reduce_max(largest));
    const Vec scale = Isa::set1(block.score_scale);
    const Vec shift = Isa::set1(-block.shift[r]);
    float* sums = block.lane_sum + r * kMaxLanes;
    Vec sum = Isa::load(sums);
    for (std::int64_t group = 0; group < granules * kKeyGranule / kMaxLanes; ++group) {
      Vec of_group = Isa::zero();
      for (int v = 0; v < kVecs; ++v) {
        float* at = scores + group * kMaxLanes + v * Isa::kLanes;
        const Vec score = Isa::load(at);
        const Vec e =
            Isa::exp2_exact(kRaw ? Isa::fma(score, scale, shift) : Isa::add(score, shift));
        of_group = Isa::add(of_group, e);
        if constexpr (!kGroups) Isa::store(at, e);
      }
      sum = Isa::add(sum, of_group);
      if constexpr (kGroups) group_sums[group] = Isa::reduce_add(of_group);
    }
    Isa::store(sums, sum);
  }

  template <bool kGroups>
  static void all_exponentials(RowBlock& block, const KeyBatch& keys,
                               float (*group_sums)[kBatchKeys / kMaxLanes]) {
    const bool raw = scores_stay_raw(block, keys);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      float* scores = block.scores + r * kBatchKeys;
      float* groups = kGroups ? group_sums[r] : nullptr;
      if (raw) {
        exponentials_row<true, kGroups>(block, r, largest_raw(block, keys.granules, scores), scores,
                                        keys.granules, groups);
      } else {
        const Vec largest = finish_scores(block, keys.granules, keys.row_mask(r), scores);
        exponentials_row<false, kGroups>(block, r, largest, scores, keys.granules, groups);
      }
    }
  }

  static void exponentials(RowBlock& block, const KeyBatch& keys,
                           float (*group_sums)[kBatchKeys / kMaxLanes]) {
    if (group_sums != nullptr) {
      all_exponentials<true>(block, keys, group_sums);
    } else {
      all_exponentials<false>(block, keys, nullptr);
    }
  }

  static void add_columns(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                          float* column_sums) {
    const float* first = probabilities + kMaxLanes;
    for (std::int64_t key = 0; key < n_keys; key += kKeyGranule) {
      Vec columns[kGranuleVecs];
      for (int v = 0; v < kGranuleVecs; ++v) {
        columns[v] = Isa::load(column_sums + key + v * Isa::kLanes);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* p = first + r * kProbabilityStride + key;
        for (int v = 0; v < kGranuleVecs; ++v) {
          columns[v] = Isa::add(columns[v], Isa::load(p + v * Isa::kLanes));
        }
      }
      for (int v = 0; v < kGranuleVecs; ++v) {
        Isa::store(column_sums + key + v * Isa::kLanes, columns[v]);
      }
    }
  }

  static void add_granules(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                           float* const* lanes) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* row = probabilities + r * kProbabilityStride + kMaxLanes;
      for (std::int64_t key = 0; key < n_keys; key += kKeyGranule) {
        float* to = lanes[r] - key / kKeyGranule * kMaxLanes;
        for (std::int64_t lane = 0; lane < kMaxLanes; lane += Isa::kLanes) {
          Vec sum = Isa::load(to + lane);
          for (std::int64_t i = lane; i < kKeyGranule; i += kMaxLanes) {
            sum = Isa::add(sum, Isa::load(row + key + i));
          }
          Isa::store(to + lane, sum);
        }
      }
    }
  }

  static void add_sums(const float* probabilities, std::int64_t rows, std::int64_t n_keys,
                       float* column_sums, float* diagonal_sums) {
    add_columns(probabilities, rows, n_keys, column_sums);
    const float* first = probabilities + kMaxLanes;
    // A vector of neighbouring diagonals moves on by one key with each row. Every sum is written
    // once: rows that added to it in memory would wait for each other's stores.
    for (std::int64_t d = 1 - rows; d < n_keys; d += Isa::kLanes) {
      const std::int64_t begin = std::max<std::int64_t>(1 - Isa::kLanes - d, 0);
      const std::int64_t end = std::min(rows, n_keys - d);
      Vec sum[2] = {Isa::load(diagonal_sums + d), Isa::zero()};
      for (std::int64_t r = begin; r < end; ++r) {
        sum[r % 2] = Isa::add(sum[r % 2], Isa::load(first + r * (kProbabilityStride + 1) + d));
      }
      Isa::store(diagonal_sums + d, Isa::add(sum[0], sum[1]));
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
          Kernels::sum_rows,
          Kernels::convert_f32_row,
          Kernels::gemm,
          Kernels::reset,
          Kernels::attend,
          Kernels::sum_exponentials,
          Kernels::split_exponentials,
          Kernels::probabilities,
          Kernels::exponentials,
          Kernels::add_columns,
          Kernels::add_granules,
          Kernels::add_sums,
          Kernels::row_sum};
}

}  // namespace minference::cpu
