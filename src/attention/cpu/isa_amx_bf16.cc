// The amx_bf16 level: 16 x 16 x 32 products of bf16 tiles, softmax in AVX-512.
#include <utility>

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
  static constexpr int kStripSteps = 4;        // steps of a strip's rows that stay in tiles
  static constexpr std::size_t kBStride = 64;  // bytes of a row of a packed tile
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

  // The tile instructions, with their registers as template arguments. A load does not tell the
  // compiler that it reads memory, so that it may keep addresses in registers: what was stored
  // before needs a barrier.
  template <int kTo>
  static void load_tile(const void* from, std::size_t row_stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_stride), "i"(kTo));
  }
  template <int kFrom>
  static void store_tile(void* to, std::size_t row_stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(to), "r"(row_stride), "i"(kFrom)
                 : "memory");
  }
  template <int kOf>
  static void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kOf));
  }
  template <int kSum, int kLeft, int kRight>
  static void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }

  // Tiles 0-3 accumulate 32 rows x 32 columns, 4-5 hold A, 6-7 hold B.
  template <bool kTwoRows, bool kTwoPanels>
  static void micro(const Left& a, const Right& b, std::int64_t panel, float* c, std::int64_t ldc,
                    bool accumulate) {
    const auto a_stride = static_cast<std::size_t>(a.row_stride) * sizeof(Elem);
    const auto c_stride = static_cast<std::size_t>(ldc) * sizeof(float);
    float* c1 = c + kTile * ldc;
    if (accumulate) {
      load_tile<0>(c, c_stride);
      if constexpr (kTwoPanels) load_tile<1>(c + kTile, c_stride);
      if constexpr (kTwoRows) load_tile<2>(c1, c_stride);
      if constexpr (kTwoRows && kTwoPanels) load_tile<3>(c1 + kTile, c_stride);
    } else {
      clear_tile<0>();
      if constexpr (kTwoPanels) clear_tile<1>();
      if constexpr (kTwoRows) clear_tile<2>();
      if constexpr (kTwoRows && kTwoPanels) clear_tile<3>();
    }
    for (std::int64_t block = 0; block < b.n_blocks; ++block) {
      const Elem* block_a = a.data + block * a.block_stride;
      const Elem* block_b = b.block(block) + panel * b.panel_stride;
      for (std::int64_t step = 0; step < b.steps; step += kTile) {
        load_tile<4>(block_a + step * kPair, a_stride);
        load_tile<6>(block_b + step * kPanelWidth * kPair, kBStride);
        add_product<0, 4, 6>();
        if constexpr (kTwoPanels) {
          load_tile<7>(block_b + b.panel_stride + step * kPanelWidth * kPair, kBStride);
          add_product<1, 4, 7>();
        }
        if constexpr (kTwoRows) {
          load_tile<5>(block_a + kTile * a.row_stride + step * kPair, a_stride);
          add_product<2, 5, 6>();
          if constexpr (kTwoPanels) add_product<3, 5, 7>();
        }
      }
    }
    store_tile<0>(c, c_stride);
    if constexpr (kTwoPanels) store_tile<1>(c + kTile, c_stride);
    if constexpr (kTwoRows) store_tile<2>(c1, c_stride);
    if constexpr (kTwoRows && kTwoPanels) store_tile<3>(c1 + kTile, c_stride);
  }

  // One tile of a strip's product, summed in tile kSum; tiles 4 and up hold the strip's steps.
  template <int kSum, class TileAt, int... kStep>
  static void strip_tile(float* c, std::size_t c_stride, bool accumulate, TileAt&& tile_at,
                         std::integer_sequence<int, kStep...> /*steps*/) {
    if (accumulate) {
      load_tile<kSum>(c, c_stride);
    } else {
      clear_tile<kSum>();
    }
    ((load_tile<2 + kStep % 2>(tile_at(kStep), kBStride),
      add_product<kSum, 4 + kStep, 2 + kStep % 2>()),
     ...);
    store_tile<kSum>(c, c_stride);
  }

  // c[16][16 * panels] = a[16][32 * steps] * b (+ c), one tile of c after the other; tile_at(panel,
  // step) is that tile of b. The steps of a tile follow each other at the full rate, but to load,
  // clear or store one takes as long as several steps: the next tile's steps go on meanwhile.
  template <class TileAt, int... kStep>
  static void strip_product(const Elem* a, std::int64_t a_row, std::int64_t panels,
                            TileAt&& tile_at, float* c, std::int64_t ldc, bool accumulate,
                            std::integer_sequence<int, kStep...> steps) {
    const auto a_stride = static_cast<std::size_t>(a_row) * sizeof(Elem);
    const auto c_stride = static_cast<std::size_t>(ldc) * sizeof(float);
    asm volatile("" : : : "memory");  // see load_tile()
    (load_tile<4 + kStep>(a + kStep * kTile * kPair, a_stride), ...);
    for (std::int64_t panel = 0; panel < panels;) {
      const auto at = [&](int step) { return tile_at(panel, step); };
      strip_tile<0>(c + panel * kTile, c_stride, accumulate, at, steps);
      if (++panel == panels) break;
      strip_tile<1>(c + panel * kTile, c_stride, accumulate, at, steps);
      ++panel;
    }
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
    asm volatile("" : : : "memory");  // see load_tile()
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
