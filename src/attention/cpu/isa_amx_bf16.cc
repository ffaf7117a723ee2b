// The amx_bf16 level: 16 x 16 x 32 products of bf16 tiles, softmax in AVX-512.
#include "attention/cpu/vec_avx512_bf16.h"

namespace minference::cpu {
namespace {

// Memory operand of LDTILECFG (Intel SDM, palette 1).
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

struct AmxBf16Isa : Avx512Bf16Vector {
  static constexpr std::int64_t kTile = 16;  // rows of a tile, and f32 columns of an accumulator
  static constexpr std::int64_t kDimAlign = 32;
  static constexpr std::int64_t kStripRows = kTile;
  static constexpr bool kMatrixUnit = true;

  static void enter() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_per_row[tile] = 64;
      config.rows[tile] = kTile;
    }
    // Not _tile_loadconfig: before GCC 13.3 its operand covers 8 of the 64 bytes, and the stores to
    // the others are removed as dead.
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void leave() { asm volatile("tilerelease"); }

  using Left = RowMajor<Elem>;
  using Right = PackedPanels<Elem>;

  // Tiles 0-3 accumulate 32 rows x 32 columns, 4-5 hold A, 6-7 hold B.
  template <bool kTwoRows, bool kTwoPanels>
  static void micro(const Left& a, const Right& b, std::int64_t panel, float* c, std::int64_t ldc,
                    bool accumulate) {
    const auto a_stride = static_cast<std::size_t>(a.row_stride) * sizeof(Elem);
    const auto c_stride = static_cast<std::size_t>(ldc) * sizeof(float);
    constexpr std::size_t kBStride = 64;
    float* c1 = c + kTile * ldc;
    if (accumulate) {
      _tile_loadd(0, c, c_stride);
      if constexpr (kTwoPanels) _tile_loadd(1, c + kTile, c_stride);
      if constexpr (kTwoRows) _tile_loadd(2, c1, c_stride);
      if constexpr (kTwoRows && kTwoPanels) _tile_loadd(3, c1 + kTile, c_stride);
    } else {
      _tile_zero(0);
      if constexpr (kTwoPanels) _tile_zero(1);
      if constexpr (kTwoRows) _tile_zero(2);
      if constexpr (kTwoRows && kTwoPanels) _tile_zero(3);
    }
    for (std::int64_t block = 0; block < b.n_blocks; ++block) {
      const Elem* block_a = a.data + block * a.block_stride;
      const Elem* block_b = b.block(block) + panel * b.panel_stride;
      for (std::int64_t step = 0; step < b.steps; step += kTile) {
        _tile_loadd(4, block_a + step * kPair, a_stride);
        _tile_loadd(6, block_b + step * kPanelWidth * kPair, kBStride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kTwoPanels) {
          _tile_loadd(7, block_b + b.panel_stride + step * kPanelWidth * kPair, kBStride);
          _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kTwoRows) {
          _tile_loadd(5, block_a + kTile * a.row_stride + step * kPair, a_stride);
          _tile_dpbf16ps(2, 5, 6);
          if constexpr (kTwoPanels) _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    _tile_stored(0, c, c_stride);
    if constexpr (kTwoPanels) _tile_stored(1, c + kTile, c_stride);
    if constexpr (kTwoRows) _tile_stored(2, c1, c_stride);
    if constexpr (kTwoRows && kTwoPanels) _tile_stored(3, c1 + kTile, c_stride);
  }

  template <bool kTwoRows>
  static void all_panels(const Left& a, const Right& b, float* c, std::int64_t ldc,
                         bool accumulate) {
    std::int64_t panel = 0;
    for (; panel + 2 <= b.panels; panel += 2) {
      micro<kTwoRows, true>(a, b, panel, c + panel * kPanelWidth, ldc, accumulate);
    }
    if (panel < b.panels) {
      micro<kTwoRows, false>(a, b, panel, c + panel * kPanelWidth, ldc, accumulate);
    }
  }

  // Rows are rounded up to whole tiles: operands have kTileRows rows, and what the extra rows hold
  // touches no other row.
  static void gemm(const Left& a, std::int64_t rows, const Right& b, float* c, std::int64_t ldc,
                   bool accumulate) {
    std::int64_t i = 0;
    for (; i + kTile < rows; i += 2 * kTile) {
      all_panels<true>(a.at(i), b, c + i * ldc, ldc, accumulate);
    }
    if (i < rows) all_panels<false>(a.at(i), b, c + i * ldc, ldc, accumulate);
  }
};

}  // namespace

const KernelTable& amx_bf16_kernels() {
  static const KernelTable table = make_kernel_table<AmxBf16Isa>(IsaLevel::kAmxBf16);
  return table;
}

}  // namespace minference::cpu
