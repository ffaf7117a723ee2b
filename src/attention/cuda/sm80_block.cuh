// The thread block of the sm_80 executor: what its warps do with the tiles that it draws.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/box_ring.cuh"
#include "attention/cuda/elements.cuh"
#include "attention/cuda/mma.cuh"
#include "attention/cuda/row_bits.cuh"
#include "attention/cuda/shared_rows.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/tile_order.cuh"

namespace minference::cuda::sm80 {

constexpr int kMaxSlots = 4;  // or 2

// What the host chooses for a launch.
struct Launch {
  int slots = 2;
  // 16-byte copies can follow the tensor's rows, and its elements need no conversion.
  bool q_vectors = false;
  bool k_vectors = false;
  bool v_vectors = false;
};

// Work split of a head shape. kDim and kVDim are head dims rounded up.
template <int kDim, int kVDim>
struct Shape {
  static constexpr int kLargest = std::max(kDim, kVDim);
  // A fragment of keys or values that feeds two row tiles halves the reads of shared memory, which
  // bound a warp with one; with larger heads the sums of two do not fit in its registers.
  static constexpr int kRowTiles = kLargest <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kWarps = kTileRows / kWarpRows;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocks =
      kLargest <= 64 ? 3 : (kLargest <= 128 ? 2 : 1);  // on a multiprocessor
  // Fragments are read a step ahead, unless so many warps take turns that registers are worth more.
  static constexpr int kBuffers = kBlocks > 2 ? 1 : 2;
  // Keys of a slot. Of the largest heads, two slots of 64 would exceed the 99 KB of small GPUs.
  static constexpr int kKeys = kLargest <= 192 ? 64 : 32;
  static constexpr int kParts = kBoxKeys / kKeys;
  static constexpr int kQBytes = kTileRows * kDim * 2;
  static constexpr int kSlotBytes = kKeys * kLargest * 2;
};

struct alignas(128) Control {
  BoxRing ring;
  RowTile tile;  // row_end 0: there is no more work
  Geometry geometry;
  // First row of the tile's keys and of its values; nothing where they are paged.
  const char* keys;
  const char* values;
  unsigned long long kept;
  std::uint64_t visible[kTileRows];  // masks of the box being worked on
};

template <class T, int kDim, int kVDim>
class Block {
  using S = Shape<kDim, kVDim>;
  static constexpr int kRowTiles = S::kRowTiles;

 public:
  __device__ __forceinline__ Block(const Problem& problem, const DeviceIndex& index,
                                   const Launch& launch, Control& control, char* q)
      : problem_(problem),
        index_(index),
        launch_(launch),
        control_(control),
        tile_(control.tile),
        q_(shared_address(q)),
        slots_(q_ + S::kQBytes),
        plain_(problem.scale > 0 && problem.soft_cap == 0),
        factor_((problem.soft_cap > 0 ? 1.0F : fabsf(problem.scale)) * kLog2E) {}

  __device__ __forceinline__ void run(int* tickets) {
    const TileOrder order(problem_);
    if (threadIdx.x == 0) control_.kept = 0;
    for (;;) {
      __syncthreads();
      if (threadIdx.x == 0) draw_tile(order, tickets);
      __syncthreads();
      if (tile_.row_end == 0) break;
      attend();
      if (!write_rows()) tickets[1] = 1;
    }
    if (threadIdx.x == 0 && problem_.kept_pairs != nullptr) {
      atomicAdd(problem_.kept_pairs, control_.kept);
    }
  }

 private:
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ int group() const { return warp() * S::kWarpRows / kGroupRows; }
  __device__ __forceinline__ int first_row() const { return tile_.base + warp() * S::kWarpRows; }

  __device__ __forceinline__ void draw_tile(const TileOrder& order, int* tickets) {
    for (;;) {
      const int turn = atomicAdd(tickets, 1);
      if (turn >= order.count()) {
        control_.tile.row_end = 0;
        return;
      }
      RowTile tile;
      if (!order.tile(index_, turn, tile)) continue;
      control_.tile = tile;
      control_.geometry = sequence_geometry(problem_, tile.b);
      control_.keys = tensor_row(problem_.k, tile.b, 0, tile.h / problem_.group);
      control_.values = tensor_row(problem_.v, tile.b, 0, tile.h / problem_.group);
      return;
    }
  }

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kVDim / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) outputs_[i][n][c] = 0;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum_[i][half] = -kInfinity;
        sum_[i][half] = 0;
      }
    }
    if (warp() == 0) control_.ring.start(problem_, index_, tile_);
    load_queries();
    __syncthreads();
    for (int item = 1 - launch_.slots;; ++item) {
      // Boxes were made long ago: they are read while this warp waits for others.
      const int now = max(item, 0);
      const Box& box = box_of(now);
      const bool last = (box.flags & Box::kEndOfTile) != 0;
      const bool used = part_word(box, group(), part_of(now)) != 0;
      const Box& ahead = box_of(item + launch_.slots - 1);
      const int start = ahead.start;
      const std::uint32_t flags = ahead.flags;
      wait_for_slot();
      __syncthreads();
      load(item + launch_.slots - 1, ahead, start, flags);
      if (item < 0) continue;
      if (last) break;
      if (is_values(item)) {
        if (used) add_values(slot_of(item));
        continue;
      }
      constexpr int kItems = BoxRing::kBatch * S::kParts * 2;
      if (item % kItems == 0 && warp() == 0) control_.ring.make_batch(item / kItems + 1);
      if (used) attend_keys(box, part_of(item), slot_of(item));
    }
  }

  // ---- Loading. What is loaded into a slot is an item: the keys or the values of a part of a box.

  __device__ __forceinline__ static bool is_values(int item) { return item % 2 != 0; }
  __device__ __forceinline__ static int part_of(int item) { return item / 2 % S::kParts; }
  __device__ __forceinline__ const Box& box_of(int item) const {
    return control_.ring.boxes[item / (2 * S::kParts) % BoxRing::kBoxes];
  }
  __device__ __forceinline__ std::uint32_t slot_of(int item) const {
    return slots_ + (item & (launch_.slots - 1)) * S::kSlotBytes;
  }

  __device__ __forceinline__ static std::uint64_t part_word(const Box& box, int group, int part) {
    if constexpr (S::kParts == 1) return box.word[group];
    return static_cast<std::uint32_t>(box.word[group] >> (part * S::kKeys));
  }

  // Until all of the next slot's copies that this thread began are done.
  __device__ __forceinline__ void wait_for_slot() const {
    if (launch_.slots == 2) {
      cp_async_wait<0>();
    } else {
      cp_async_wait<kMaxSlots - 2>();
    }
  }

  // Begins to load an item; a group of copies even where there is nothing to load, so that groups can
  // be counted. start, flags: the box's.
  __device__ __forceinline__ void load(int item, const Box& box, int start, std::uint32_t flags) {
    const int part = part_of(item);
    const bool nothing = S::kParts == 1 ? (flags & Box::kEndOfTile) != 0
                                        : (part_word(box, 0, part) | part_word(box, 1, part)) == 0;
    if (!nothing) {
      const bool columns = (flags & Box::kColumns) != 0;
      const int first = start + part * S::kKeys;
      if constexpr (kDim == kVDim) {
        load_slot<kDim>(slot_of(item), first, columns, is_values(item));
      } else if (is_values(item)) {
        load_slot<kVDim>(slot_of(item), first, columns, true);
      } else {
        load_slot<kDim>(slot_of(item), first, columns, false);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void load_queries() {
    const char* const first = tensor_row(problem_.q, tile_.b, tile_.base, tile_.h);
    const int count = tile_.row_end - tile_.base;
    const SharedRows<T, kDim, kTileRows, S::kThreads> to{q_, problem_.dim};
    if (launch_.q_vectors) {
      to.copy(first, problem_.q.token_stride, 0, count);
    } else {
      to.convert(problem_.q.dtype, [&](int r) {
        return r < count ? tensor_row(problem_.q, tile_.b, tile_.base + r, tile_.h) : nullptr;
      });
    }
  }

  // Keys or values from the first on, which counts columns where `columns`.
  template <int kWidth>
  __device__ __forceinline__ void load_slot(std::uint32_t to_address, int first, bool columns,
                                            bool values) {
    const DeviceTensor& tensor = values ? problem_.v : problem_.k;
    const SharedRows<T, kWidth, S::kKeys, S::kThreads> to{to_address,
                                                          values ? problem_.v_dim : problem_.dim};
    const bool vectors = values ? launch_.v_vectors : launch_.k_vectors;
    if (vectors && !columns && problem_.block_table == nullptr) {
      to.copy((values ? control_.values : control_.keys) + first * tensor.token_stride * 2,
              tensor.token_stride, -first, control_.geometry.kv_len - first);
      return;
    }
    const BoxRows from(problem_, index_, tile_, first, columns, tensor);
    if (vectors) {
      to.gather([&](int r) { return from.row(r); });
    } else {
      to.convert(tensor.dtype, [&](int r) { return from.row(r); });
    }
  }

  // ---- Multiplying.

  __device__ __forceinline__ void attend_keys(const Box& box, int part, std::uint32_t keys) {
    float scores[kRowTiles][S::kKeys / 8][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[i][n][c] = 0;
      }
    }
    // A fragment's lanes give the addresses of its rows; the chunk is 0 or 1 at first.
    const int q_row = warp() * S::kWarpRows + lane() % 16;
    const std::uint32_t q_first = q_ + q_row * kDim * 2 + swizzled<kDim>(lane() / 16, q_row) * 16;
    const int key = lane() / 16 * 8 + lane() % 8;
    const std::uint32_t first = keys + key * kDim * 2 + swizzled<kDim>(lane() / 8 % 2, key) * 16;
    std::uint32_t a[S::kBuffers][kRowTiles][4];
    std::uint32_t b[S::kBuffers][S::kKeys / 16][4];
    const auto read = [&](int step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ldmatrix_x4(a[step % S::kBuffers][i],
                    chunks_behind<kDim>(q_first, step * 2) + i * 16 * kDim * 2);
      }
#pragma unroll
      for (int n = 0; n < S::kKeys / 16; ++n) {
        ldmatrix_x4(b[step % S::kBuffers][n],
                    chunks_behind<kDim>(first, step * 2) + n * 16 * kDim * 2);
      }
    };
    if constexpr (S::kBuffers == 2) read(0);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int next = step + S::kBuffers - 1;
      if (next < kDim / 16) read(next);
#pragma unroll
      for (int n = 0; n < S::kKeys / 16; ++n) {
        const std::uint32_t(&keys16)[4] = b[step % S::kBuffers][n];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_16816<T>(scores[i][n * 2], a[step % S::kBuffers][i], keys16[0], keys16[1]);
          mma_16816<T>(scores[i][n * 2 + 1], a[step % S::kBuffers][i], keys16[2], keys16[3]);
        }
      }
    }
    if (!plain_) make_logits(scores);
    if (box.masked_for(group())) {
      mask(scores, box, part);
    } else if (problem_.kept_pairs != nullptr && lane() == 0) {
      const int rows =
          min(first_row() + S::kWarpRows, tile_.row_end) - max(first_row(), tile_.row_begin);
      atomicAdd(&control_.kept, static_cast<unsigned long long>(max(rows, 0)) * S::kKeys);
    }
    softmax(scores);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int step = 0; step < S::kKeys / 16; ++step) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float(&pair)[4] = scores[i][step * 2 + c / 2];
          weights_[i][step][c] = pack_pair<T>(pair[c % 2 * 2], pair[c % 2 * 2 + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(std::uint32_t values) {
    const int value = lane() % 16;
    const std::uint32_t first =
        values + value * kVDim * 2 + swizzled<kVDim>(lane() / 16, value) * 16;
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kVDim / 16; ++n) {
        std::uint32_t b[4];
        ldmatrix_x4_trans(b, chunks_behind<kVDim>(first, n * 2) + step * 16 * kVDim * 2);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_16816<T>(outputs_[i][n * 2], weights_[i][step], b[0], b[1]);
          mma_16816<T>(outputs_[i][n * 2 + 1], weights_[i][step], b[2], b[3]);
        }
      }
    }
  }

  using Scores = float[kRowTiles][S::kKeys / 8][4];

  // Scores in units of factor_, where scaling alone does not make them so.
  __device__ __forceinline__ void make_logits(Scores& scores) const {
    const float cap = problem_.soft_cap;
    const float exponent = soft_cap_exponent(cap, problem_.scale);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& score = scores[i][n][c];
          score = cap > 0 ? soft_capped(score, cap, exponent) : -score;
        }
      }
    }
  }

  __device__ __forceinline__ void mask(Scores& scores, const Box& box, int part) {
    const Geometry geometry = control_.geometry;
    std::uint64_t* const visible = control_.visible + warp() * S::kWarpRows;
    int kept = 0;
    __syncwarp();
#pragma unroll 1
    for (int r = lane() / 4; r < S::kWarpRows; r += 8) {
      const int row = first_row() + r;
      std::uint64_t bits = visible_bits(problem_, index_, geometry, tile_, box, group(), row);
      if constexpr (S::kParts > 1) bits = static_cast<std::uint32_t>(bits >> (part * S::kKeys));
      if (lane() % 4 == 0) {
        visible[r] = bits;
        if (row >= tile_.row_begin && row < tile_.row_end) kept += __popcll(bits);
      }
    }
    __syncwarp();
    if (problem_.kept_pairs != nullptr) {
      kept = __reduce_add_sync(~0U, kept);
      if (lane() == 0) atomicAdd(&control_.kept, static_cast<unsigned long long>(kept));
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint64_t mine = visible[i * 16 + half * 8 + lane() / 4] >> (lane() % 4 * 2);
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if ((mine >> (n * 8 + c) & 1) == 0) scores[i][n][half * 2 + c] = -kInfinity;
          }
        }
      }
    }
  }

  // Turns scores into weights relative to maximum_, which it raises where it has to, and shrinks the
  // sums so far accordingly.
  __device__ __forceinline__ void softmax(Scores& scores) {
    // Of the thread's scores: rows are compared as a whole only when one has grown.
    float largest[kRowTiles][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = fmaxf(scores[i][0][half * 2], scores[i][0][half * 2 + 1]);
#pragma unroll
        for (int n = 1; n < S::kKeys / 8; ++n) {
          value = fmaxf(value, fmaxf(scores[i][n][half * 2], scores[i][n][half * 2 + 1]));
        }
        largest[i][half] = value * factor_;
        grown = grown || largest[i][half] > maximum_[i][half] + kRescaleThreshold;
      }
    }
    if (__any_sync(~0U, grown)) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) raise_maxima(i, largest[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = maximum_[i][half] == -kInfinity ? 0.0F : maximum_[i][half];
        float sum = 0;
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& score = scores[i][n][half * 2 + c];
            score = exp2_fast(fmaf(score, factor_, -shift));
            sum += score;
          }
        }
        sum_[i][half] += sum;
      }
    }
  }

  __device__ __forceinline__ void raise_maxima(int i, const float (&largest)[2]) {
    float growth[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float raised = fmaxf(maximum_[i][half], largest[half]);
      raised = fmaxf(raised, __shfl_xor_sync(~0U, raised, 1));
      raised = fmaxf(raised, __shfl_xor_sync(~0U, raised, 2));
      // Rows that have seen nothing keep -inf, and a difference of infinities is none.
      growth[half] = raised == -kInfinity ? 1.0F : exp2_fast(maximum_[i][half] - raised);
      maximum_[i][half] = raised;
      sum_[i][half] *= growth[half];
    }
#pragma unroll
    for (int n = 0; n < kVDim / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) outputs_[i][n][c] *= growth[c / 2];
    }
  }

  // False where an output is not finite.
  __device__ __forceinline__ bool write_rows() {
    float nothing = 0;  // but NaN once a value that is not finite has been multiplied in
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowSum total;
        total.shift = maximum_[i][half];
        total.sum = sum_[i][half];
        total.sum += __shfl_xor_sync(~0U, total.sum, 1);
        total.sum += __shfl_xor_sync(~0U, total.sum, 2);
        const float weight = total.close(problem_.sinks, tile_.h);
        const int row = first_row() + i * 16 + half * 8 + lane() / 4;
        const bool asked_for = row >= tile_.row_begin && row < tile_.row_end;
        if (asked_for && lane() % 4 == 0) {
          store_lse(problem_, tile_.b, row, tile_.h, total.lse());
        }
#pragma unroll
        for (int n = 0; n < kVDim / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& output = outputs_[i][n][half * 2 + c];
            output *= weight;
            if (asked_for) nothing = fmaf(output, 0.0F, nothing);
          }
        }
      }
    }
    write_columns<0>();
    write_columns<1>();
    return nothing == 0;
  }

  // Writes a half of the columns of the warp's rows, by way of the shared memory of its queries, which
  // nobody needs any more: a fragment's lanes hold pieces of many rows.
  template <int kHalf>
  __device__ __forceinline__ void write_columns() {
    constexpr int kColumns = kVDim / 2;
    constexpr int kPairs = kColumns / 2;
    static_assert(kColumns * 4 <= kDim * 2);
    const auto place = [&](int r, int pair) {
      const int swizzle = kColumns % 32 == 0 ? r % 4 * 4 : 0;
      return q_ + (warp() * S::kWarpRows + r) * kDim * 2 + (pair ^ swizzle) * 8;
    };
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const float* const pair = outputs_[i][kHalf * (kColumns / 8) + n] + half * 2;
          store_shared(place(i * 16 + half * 8 + lane() / 4, n * 4 + lane() % 4), pair[0], pair[1]);
        }
      }
    }
    __syncwarp();
    const std::int64_t stride = problem_.out.token_stride * element_size(problem_.out.dtype);
    for (int pair = lane(); pair < kPairs; pair += 32) {
      const int column = kHalf * kColumns + pair * 2;
      char* to = tensor_row(problem_.out, tile_.b, first_row(), tile_.h);
#pragma unroll 4
      for (int r = 0; r < S::kWarpRows; ++r, to += stride) {
        const int row = first_row() + r;
        if (row < tile_.row_begin || row >= tile_.row_end) continue;
        const float2 values = load_shared(place(r, pair));
        store_pair(to, problem_.out.dtype, column, problem_.v_dim - column, values.x, values.y);
      }
    }
  }

  const Problem& problem_;
  const DeviceIndex& index_;
  const Launch& launch_;
  Control& control_;
  const RowTile& tile_;
  std::uint32_t q_;
  std::uint32_t slots_;
  bool plain_;    // scores need nothing but a positive factor: others would turn maxima around
  float factor_;  // on scores, in f32; makes them exponents of 2
  // The thread holds, of every 16 rows, rows lane / 4 and lane / 4 + 8, and of every 8 columns two.
  std::uint32_t weights_[kRowTiles][S::kKeys / 16][4];
  float outputs_[kRowTiles][kVDim / 8][4];
  float maximum_[kRowTiles][2];
  float sum_[kRowTiles][2];
};

}  // namespace minference::cuda::sm80
