// The tiles of cells that thread blocks work on, and how they get into shared memory.
#pragma once

#include <cstdint>

#include "attention/cuda/ptx.cuh"
#include "index/cuda/cell_scores.h"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::cells {

inline constexpr int kStages = CellScores::kStages;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr int kRowBytes = kPanelDims * 2;  // of a tile
// Tiles side by side that thread blocks work on at a time, one row of tiles after the other: few enough
// that their keys stay in the L2 cache.
inline constexpr int kBand = 8;

struct Arguments {
  Problem problem;
  CellScores plan;
  int first_head = 0;
  int heads = 0;
  int first_row = 0;
  int rows = 0;
  int columns = 0;  // cells of a tile
  int stages = 0;
  int panels = 1;   // of 64 dims
  int cluster = 1;  // thread blocks; on Hopper, whose tiles are of 256 cells of keys, 2 or 4
  bool side_by_side =
      false;  // a cluster's blocks work on heads of one KV head, not on rows of one head
  Chunks chunks = Chunks::kParts;
  bool bulk_rows = false;  // the copy engine can follow the tensor
  bool bulk_keys = false;
};

struct Maps {
  CUtensorMap rows, keys;
};

// A tile: row `row` of tiles of head `head`, both of this launch, and cells of keys from column * columns
// on. head < 0: there is no more work.
struct CellTile {
  int head = 0;
  int row = 0;
  int column = 0;
};

struct Control {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  CellTile tiles[kStages];  // that a stage's dims belong to
};

constexpr int shared_bytes(int columns, int stages) {
  return 1024 + stages * (CellScores::kTileRows + columns) * kRowBytes +
         static_cast<int>(sizeof(Control));
}

// The tiles of a thread block.
class TileWalk {
 public:
  // `rank`: of the block in its cluster.
  __device__ TileWalk(const Arguments& a, int rank)
      : a_(a),
        heads_at_a_time_(a.side_by_side ? a.cluster : 1),
        tiles_at_a_time_(a.cluster / heads_at_a_time_),
        rank_(rank),
        ahead_(static_cast<int>(blockIdx.x) / a.cluster) {
    const int rows_at_a_time = tiles_at_a_time_ * CellScores::kTileRows;
    rows_ = (a.rows + rows_at_a_time - 1) / rows_at_a_time;
    const int columns = a.plan.cells(a.problem.kv_tokens);
    const int band = kBand * a.columns;
    bands_ = (columns + band - 1) / band;
    if (a.heads > 0) geometry_ = geometry_of(0);
  }

  __device__ bool next(CellTile& tile) {
    while (head_ < a_.heads) {
      int begin;
      const int count = visible_tiles(begin);
      if (ahead_ < count) {
        tile = {head_, row_ * tiles_at_a_time_, begin + ahead_};
        (a_.side_by_side ? tile.head : tile.row) += rank_;
        ahead_ += static_cast<int>(gridDim.x) / a_.cluster;
        return true;
      }
      ahead_ -= count;
      if (++row_ < rows_) continue;
      row_ = 0;
      if (++band_ < bands_) continue;
      band_ = 0;
      head_ += heads_at_a_time_;
      if (head_ < a_.heads) geometry_ = geometry_of(head_);
    }
    return false;
  }

 private:
  __device__ Geometry geometry_of(int head) const {
    return sequence_geometry(a_.problem, (a_.first_head + head) / a_.problem.q_heads);
  }

  // Of the cluster's current rows and band.
  __device__ int visible_tiles(int& begin) const {
    const int rows = tiles_at_a_time_ * CellScores::kTileRows;
    const int first = first_cell(a_.plan, geometry_, a_.first_row) + row_ * rows;
    const int cells = a_.plan.cells(geometry_.q_len);
    if (first >= cells) return 0;
    const CellRange seen(geometry_, a_.plan.stride, first, min(first + rows, cells) - 1);
    if (seen.begin >= seen.end) return 0;
    begin = max(seen.begin / a_.columns, band_ * kBand);
    const int end = min((seen.end + a_.columns - 1) / a_.columns, (band_ + 1) * kBand);
    return max(end - begin, 0);
  }

  const Arguments& a_;
  Geometry geometry_;
  int heads_at_a_time_;
  int tiles_at_a_time_;
  int rank_;
  int rows_;
  int bands_;
  int head_ = 0;
  int row_ = 0;
  int band_ = 0;
  int ahead_;  // tiles to pass over from here
};

// Moves a thread's share of a tile: chunk `chunk_` of every 16th row.
class Loader {
 public:
  __device__ Loader(const Arguments& a, const Maps& maps, int rank)
      : a_(a),
        maps_(maps),
        rank_(rank),
        chunk_(static_cast<int>(threadIdx.x) % kChunkDims),
        row_(static_cast<int>(threadIdx.x) % 128 / kChunkDims),
        to_(chunk_offset(row_, chunk_)) {}

  __device__ void start(const CellTile& tile) {
    const Problem& problem = a_.problem;
    b_ = (a_.first_head + tile.head) / problem.q_heads;
    h_ = (a_.first_head + tile.head) % problem.q_heads;
    geometry_ = sequence_geometry(problem, b_);
    first_row_ = first_cell(a_.plan, geometry_, a_.first_row) + tile.row * CellScores::kTileRows;
    first_key_ = tile.column * a_.columns;
    const bool plain = a_.chunks == Chunks::kWhole && problem.dim == a_.panels * kPanelDims;
    const bool all_rows = (first_row_ + CellScores::kTileRows) * a_.plan.stride <= geometry_.q_len;
    const bool all_keys = (first_key_ + a_.columns) * a_.plan.stride <= geometry_.kv_len;
    plain_rows_ = plain && all_rows;
    plain_keys_ = plain && problem.block_table == nullptr && all_keys;
    bulk_rows_ = a_.bulk_rows && all_rows;
    bulk_keys_ = a_.bulk_keys && all_keys;
  }

  // Whether the copy engine fetches all of the tile.
  __device__ bool is_bulk() const { return bulk_rows_ && bulk_keys_; }

  // `full`: the barrier that bulk copies report to.
  template <int kColumns, int kCluster>
  __device__ __forceinline__ void load(int phase, int panel, std::uint32_t tile,
                                       std::uint32_t full) const {
    const std::uint32_t keys = tile + CellScores::kTileRows * kRowBytes;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (threadIdx.x == 0) load_bulk<kColumns, kCluster>(phase, panel, tile, keys, full);
#endif
    if (!bulk_rows_) load_rows(phase, panel, tile);
    if (!bulk_keys_) load_keys<kColumns>(phase, panel, keys);
  }

 private:
  static constexpr int kRowStep = 128 / kChunkDims;

  // What the copy engine fetches: all rows, and this block's share of the keys for the whole cluster.
  template <int kColumns, int kCluster>
  __device__ __forceinline__ void load_bulk(int phase, int panel, std::uint32_t rows,
                                            std::uint32_t keys, std::uint32_t full) const {
    if (bulk_rows_) {
      mbarrier_expect(full, CellScores::kTileRows * kRowBytes);
      copy_tensor_5d(rows, &maps_.rows, full, panel * kPanelDims, a_.plan.stride - 1 - phase, h_,
                     first_row_, b_);
    }
    if (bulk_keys_) {
      constexpr int kShare = kColumns / kCluster;
      mbarrier_expect(full, kColumns * kRowBytes);
      copy_tensor_5d_multicast(keys + rank_ * kShare * kRowBytes, &maps_.keys, full,
                               (1U << kCluster) - 1, panel * kPanelDims, phase,
                               h_ / a_.problem.group, first_key_ + rank_ * kShare, b_);
    }
  }

  __device__ __forceinline__ void load_rows(int phase, int panel, std::uint32_t to) const {
    const int stride = a_.plan.stride;
    if (plain_rows_) {
      load_plain<CellScores::kTileRows>(
          query_row(a_.problem, b_, h_, (first_row_ + row_) * stride + stride - 1 - phase), panel,
          a_.problem.q.token_stride * stride, to);
      return;
    }
    const int cells = a_.plan.cells(geometry_.q_len);
    load_any<CellScores::kTileRows>(panel, to, [&](int i, const char*& from) {
      const int cell = first_row_ + i;
      if (cell >= cells) return false;
      // A last cell that lacks rows repeats those it has.
      const int length = min(stride, geometry_.q_len - cell * stride);
      from = query_row(a_.problem, b_, h_, cell * stride + (stride - 1 - phase) % length);
      return true;
    });
  }

  template <int kColumns>
  __device__ __forceinline__ void load_keys(int phase, int panel, std::uint32_t to) const {
    const int stride = a_.plan.stride;
    const int kv_head = h_ / a_.problem.group;
    if (plain_keys_) {
      load_plain<kColumns>(key_row(a_.problem, b_, kv_head, (first_key_ + row_) * stride + phase),
                           panel, a_.problem.k.token_stride * stride, to);
      return;
    }
    load_any<kColumns>(panel, to, [&](int i, const char*& from) {
      const int key = (first_key_ + i) * stride + phase;
      if (key >= geometry_.kv_len) return false;
      from = key_row(a_.problem, b_, kv_head, key);
      return true;
    });
  }

  template <int kRows>
  __device__ __forceinline__ void load_plain(const char* from, int panel, std::int64_t cell_stride,
                                             std::uint32_t tile) const {
    from += (panel * kPanelDims + chunk_ * kChunkDims) * 2;
    const std::int64_t step = cell_stride * kRowStep * 2;
#pragma unroll 8
    for (int i = 0; i < kRows / kRowStep; ++i, from += step) {
      cp_async_16(tile + to_ + i * kRowStep * kRowBytes, from, true);
    }
  }

  // row(i, address): whether row i exists.
  template <int kRows, class Row>
  __device__ void load_any(int panel, std::uint32_t tile, Row&& row) const {
    const int first = panel * kPanelDims + chunk_ * kChunkDims;
#pragma unroll 1
    for (int i = 0; i < kRows / kRowStep; ++i) {
      const char* from = a_.problem.k.data;
      const bool exists = row(i * kRowStep + row_, from) && first < a_.problem.dim;
      const std::uint32_t to = tile + to_ + i * kRowStep * kRowBytes;
      if (a_.chunks == Chunks::kWhole) {
        cp_async_16(to, exists ? from + first * 2 : a_.problem.k.data, exists);
      } else {
        copy_chunk(to, from + first * element_bytes(a_.chunks), exists, a_.chunks);
      }
    }
  }

  const Arguments& a_;
  const Maps& maps_;
  int rank_;
  int chunk_;
  int row_;
  int to_;
  int b_ = 0;
  int h_ = 0;
  int first_row_ = 0;
  int first_key_ = 0;
  bool plain_rows_ = false;
  bool plain_keys_ = false;
  bool bulk_rows_ = false;
  bool bulk_keys_ = false;
  Geometry geometry_;
};

struct Cursor {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Executed by one warpgroup.
template <int kColumns, int kCluster>
__device__ void produce(const Arguments& a, const Maps& maps, int rank, Control& control,
                        std::uint32_t stages) {
  constexpr int kStageBytes = (CellScores::kTileRows + kColumns) * kRowBytes;
  constexpr int kAhead = 2;  // stages in flight of one thread
  TileWalk walk(a, rank);
  Loader loader(a, maps, rank);
  Cursor at;
  int landed = 0;  // the next stage to announce
  int flying = 0;
  const auto announce = [&] {
    fence_for_products();
    arrive_at(shared_address(&control.full[landed]));
    landed = landed + 1 == a.stages ? 0 : landed + 1;
    --flying;
  };
  // The first round finds every stage empty.
  const auto take_stage = [&](const CellTile& tile) {
    wait_for_phase(shared_address(&control.empty[at.stage]), at.parity ^ 1);
    if (threadIdx.x % 128 == 0) control.tiles[at.stage] = tile;
  };
  CellTile tile;
  while (walk.next(tile)) {
    loader.start(tile);
    for (int phase = 0; phase < a.plan.stride; ++phase) {
      for (int panel = 0; panel < a.panels; ++panel) {
        take_stage(tile);
        loader.load<kColumns, kCluster>(phase, panel, stages + at.stage * kStageBytes,
                                        shared_address(&control.full[at.stage]));
        cp_async_commit();
        ++flying;
        if (loader.is_bulk()) {
          cp_async_wait<0>();
          while (flying > 0) announce();
        } else if (flying > kAhead) {
          cp_async_wait<kAhead>();
          announce();
        }
        at.advance(a.stages);
      }
    }
  }
  cp_async_wait<0>();
  while (flying > 0) announce();
  take_stage({-1, 0, 0});
  arrive_at(shared_address(&control.full[at.stage]));
}

}  // namespace minference::cuda::cells
