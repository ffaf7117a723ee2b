// TileOrder: in which order persistent thread blocks take the tiles of a call.
#pragma once

#include "attention/cuda/box_stream.cuh"

namespace minference::cuda {

// First the parts of divided tiles whose rows see every key: the longest must not come last. Then the
// heads of one KV head together, so that its keys stay in cache, and of these the last rows first, as
// causal rows grow longer.
template <int kRows>
class TileOrderOf {
 public:
  __device__ explicit TileOrderOf(const Problem& problem)
      : problem_(problem), tiles_((problem.q_tokens + kRows - 1) / kRows) {}

  // One turn more a head than it has tiles: rows that see every key can begin inside a tile, which
  // then has two sides.
  __device__ int count() const { return problem_.batch * problem_.q_heads * (tiles_ + 1); }

  // The tile of a turn; false where there is none.
  __device__ bool tile(const DeviceIndex& index, int turn, RowTile& tile) const {
    const int group = problem_.group;
    const int heads = problem_.batch * problem_.q_heads;
    int place = -1;  // the second side of a divided tile
    int head = turn;
    if (turn >= heads) {
      const int of_kv_head = group * tiles_;
      place = (turn - heads) % of_kv_head / group;
      head = (turn - heads) / of_kv_head * group + (turn - heads) % group;
    }
    tile.b = head / problem_.q_heads;
    tile.h = head % problem_.q_heads;
    const Geometry geometry = sequence_geometry(problem_, tile.b);
    int dense_rows = 0;
    if (index.heads != nullptr) {
      dense_rows = index.heads[tile.b * problem_.q_heads + tile.h].dense_last_rows;
    }
    const int dense_from = max(geometry.q_len - dense_rows, 0);
    if (place < 0) {
      tile.base = dense_from / kRows * kRows;
      tile.row_begin = dense_from;
      if (dense_from == tile.base) return false;
    } else {
      tile.base = (tiles_ - 1 - place) * kRows;
      tile.row_begin = tile.base;
    }
    tile.row_end = min(tile.base + kRows, geometry.q_len);
    if (place >= 0 && tile.row_begin < dense_from) tile.row_end = min(tile.row_end, dense_from);
    return tile.row_begin < tile.row_end;
  }

 private:
  const Problem& problem_;
  int tiles_;
};
using TileOrder = TileOrderOf<kTileRows>;

}  // namespace minference::cuda
