// VectorGemm: the product of every ISA level without a matrix unit, and the operands of any level's.
//
// For tile_kernels.h, whose rule holds here too: only ISA bodies may instantiate it.
#pragma once

#include "attention/cpu/kernel_table.h"

namespace minference::cpu {

// A packed right-hand operand of a product: blocks along k, each holding all panels of 16 columns, a
// panel being a sequence of k-steps (pairs or single elements). Strides are in elements.
template <class Elem>
struct PackedPanels {
  const void* const* blocks;
  std::int64_t n_blocks;
  std::int64_t steps;  // k-steps of a block
  std::int64_t panels;
  std::int64_t panel_stride;
  std::int64_t first = 0;  // the panel to begin with

  const Elem* block(std::int64_t i) const {
    return static_cast<const Elem*>(blocks[i]) + first * panel_stride;
  }
};

// A left-hand operand: [blocks][rows][steps of a block].
template <class Elem>
struct RowMajor {
  const Elem* data;
  std::int64_t row_stride;
  std::int64_t block_stride;

  RowMajor at(std::int64_t row) const {
    return {data + row * row_stride, row_stride, block_stride};
  }
};

// C[rows, 16 * panels] = A * B (+ C), in registers of Isa::kGemmRows x Isa::kGemmPanels panels.
template <class Isa>
struct VectorGemm {
  using Vec = typename Isa::Vec;
  using Elem = typename Isa::Elem;
  using Left = RowMajor<Elem>;
  using Right = PackedPanels<Elem>;
  static constexpr std::int64_t kVecs = kPanelWidth / Isa::kLanes;  // vectors of one panel

  // The operands have at least one step. What is known at compile time, and loops without an empty
  // case, keep GCC from putting all sums on the stack before and after the loops.
  template <int kRows, int kPanels, bool kAccumulate>
  static void micro(const Left& a, const Right& b, std::int64_t panel, float* c, std::int64_t ldc) {
    constexpr int kCols = kPanels * static_cast<int>(kVecs);
    Vec sum[kRows][kCols];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kCols; ++j) {
        sum[i][j] = kAccumulate ? Isa::load(c + i * ldc + j * Isa::kLanes) : Isa::zero();
      }
    }
    std::int64_t block = 0;
    do {
      const Elem* block_a = a.data + block * a.block_stride;
      const Elem* block_b = b.block(block) + panel * b.panel_stride;
      std::int64_t step = 0;
      do {
        typename Isa::Operand columns[kCols];
        for (int j = 0; j < kCols; ++j) {
          columns[j] =
              Isa::load_operand(block_b + (j / kVecs) * b.panel_stride +
                                (step * kPanelWidth + (j % kVecs) * Isa::kLanes) * Isa::kPair);
        }
        for (int i = 0; i < kRows; ++i) {
          const typename Isa::Operand row =
              Isa::broadcast(block_a + i * a.row_stride + step * Isa::kPair);
          for (int j = 0; j < kCols; ++j) sum[i][j] = Isa::dot(sum[i][j], row, columns[j]);
        }
      } while (++step < b.steps);
    } while (++block < b.n_blocks);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kCols; ++j) Isa::store(c + i * ldc + j * Isa::kLanes, sum[i][j]);
    }
  }

  template <int kPanels, bool kAccumulate>
  static void all_rows(const Left& a, std::int64_t rows, const Right& b, std::int64_t panel,
                       float* c, std::int64_t ldc) {
    std::int64_t i = 0;
    for (; i + Isa::kGemmRows <= rows; i += Isa::kGemmRows) {
      micro<Isa::kGemmRows, kPanels, kAccumulate>(a.at(i), b, panel, c + i * ldc, ldc);
    }
    for (; i + 2 <= rows; i += 2) {
      micro<2, kPanels, kAccumulate>(a.at(i), b, panel, c + i * ldc, ldc);
    }
    if (i < rows) micro<1, kPanels, kAccumulate>(a.at(i), b, panel, c + i * ldc, ldc);
  }

  template <bool kAccumulate>
  static void all_panels(const Left& a, std::int64_t rows, const Right& b, float* c,
                         std::int64_t ldc) {
    std::int64_t panel = 0;
    for (; panel + Isa::kGemmPanels <= b.panels; panel += Isa::kGemmPanels) {
      all_rows<Isa::kGemmPanels, kAccumulate>(a, rows, b, panel, c + panel * kPanelWidth, ldc);
    }
    for (; panel < b.panels; ++panel) {
      all_rows<1, kAccumulate>(a, rows, b, panel, c + panel * kPanelWidth, ldc);
    }
  }

  static void gemm(const Left& a, std::int64_t rows, const Right& b, float* c, std::int64_t ldc,
                   bool accumulate) {
    if (accumulate) {
      all_panels<true>(a, rows, b, c, ldc);
    } else {
      all_panels<false>(a, rows, b, c, ldc);
    }
  }
};

}  // namespace minference::cpu
