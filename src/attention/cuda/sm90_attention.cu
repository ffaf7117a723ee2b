// The sm_90a executor. One warp walks the boxes of a tile, a thread of another lets the copy engine fetch
// their keys and values; two or three consumer warpgroups of 64 rows each multiply, mask and sum. A consumer
// issues the product of the next box's scores before it multiplies the values of this one, so that the
// tensor cores work while it takes the softmax; thread blocks are persistent and draw their tiles from a
// ticket.
#include "attention/cuda/sm90_attention.h"

#include <cuda.h>

#include <algorithm>
#include <string>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/check.h"
#include "attention/cuda/f32_attention.h"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm90_consumer.cuh"
#include "attention/cuda/sm90_layout.cuh"
#include "attention/cuda/tensor_map.h"
#include "attention/cuda/tile_order.cuh"
#include "minference/error.h"

namespace minference::cuda {
namespace {

using namespace sm90;  // NOLINT(google-build-using-namespace): this file is its front

// Tensor maps of one launch.
struct Maps {
  CUtensorMap q, k, v, column_keys, column_values;
};

template <class S>
class Producer {
  using Layout = Shared<S>;
  using Box = BoxOf<S::kConsumers>;
  using Origin = typename Layout::Origin;
  static constexpr int kDim = S::kDim;
  static constexpr int kVDim = S::kVDim;
  static constexpr int kBoxes = S::kBoxes;

 public:
  // `given`: the index of the call, `index`: what is left of it where the tiles are all dense.
  __device__ Producer(const Problem& problem, const DeviceIndex& given, const DeviceIndex& index,
                      const Maps& maps, typename Layout::Control& control, std::uint32_t q,
                      std::uint32_t stages)
      : problem_(problem),
        given_(given),
        index_(index),
        maps_(maps),
        control_(control),
        q_(q),
        stages_(stages) {}

  // Executed by a warp: the tiles, their queries, and what the stages hold.
  __device__ void walk(int* ticket) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const TileOrderOf<S::kRows> order(problem_);
    std::uint32_t q_phase = 0;
    for (;;) {
      int turn = 0;
      if (lane == 0) turn = atomicAdd(ticket, 1);
      turn = __shfl_sync(~0U, turn, 0);
      RowTile tile;
      const bool more = turn < order.count();
      if (more && (!order.tile(index_, turn, tile) || !takes(tile))) continue;
      if (lane == 0) {  // alone: see put()
        mbarrier_wait(shared_address(&control_.q_empty), q_phase ^ 1);
        control_.tile = tile;
        if (more) {
          load_queries(tile);
        } else {
          mbarrier_arrive(shared_address(&control_.q_full));
        }
      }
      __syncwarp();
      q_phase ^= 1;
      if (!more) {
        do put(0, {}, {-1, 0, 0});
        while (place_ != 0);
        return;
      }
      BoxStreamOf<S::kConsumers, S::kBlocks> stream;
      stream.start(problem_, index_, tile);
      Origin origin{tile.b, tile.h / problem_.group, 0};
      if (index_.heads != nullptr) {
        origin.first_column = static_cast<std::int32_t>(
            index_.heads[tile.b * problem_.q_heads + tile.h].column_begin);
      }
      Box box;
      while (std::uint32_t made = stream.next(box)) {
        for (; made != 0; made &= made - 1) put(__ffs(static_cast<int>(made)) - 1, box, origin);
      }
      if (place_ != 0) put(0, control_.boxes[at_.stage][0].unseen(), origin);
      box.flags = Box::kEndOfTile;
      do put(0, box, origin);
      while (place_ != 0);
    }
  }

  // Executed by one thread: the copies.
  __device__ void fetch() {
    for (;; at_.advance()) {
      mbarrier_wait(shared_address(&control_.described[at_.stage]), at_.phase);
      const Origin origin = control_.origins[at_.stage];
      if (origin.sequence < 0) return;
      const std::uint32_t full = shared_address(&control_.full[at_.stage]);
      if ((control_.boxes[at_.stage][0].flags & Box::kEndOfTile) != 0) {
        mbarrier_arrive(full);
        continue;
      }
      mbarrier_arrive_expect(full, Layout::kStageBytes);
      for (int place = 0; place < kBoxes; ++place) load_box(place, origin);
    }
  }

 private:
  // Where dense heads stand apart, pairs of boxes are for them and single ones for the others.
  __device__ bool takes(const RowTile& tile) const {
    if (!given_.dense_apart) return true;
    const DeviceHead& head = given_.heads[tile.b * problem_.q_heads + tile.h];
    return (head.kind == HeadIndex::Kind::kDense) == (kBoxes == 2);
  }

  __device__ void load_queries(const RowTile& tile) {
    const std::uint32_t barrier = shared_address(&control_.q_full);
    mbarrier_arrive_expect(barrier, Layout::kQBytes);
    for (int group = 0; group < S::kConsumers; ++group) {
      for (int piece = 0; piece < kDim / kPieceColumns; ++piece) {
        copy_tensor_4d(q_ + (group * (kDim / kPieceColumns) + piece) * kPieceBytes, &maps_.q,
                       barrier, piece * kPieceColumns, tile.h, tile.base + group * kGroupRows,
                       tile.b);
      }
    }
  }

  // Executed by the warp: gives the next place of the current stage to a box that one lane has.
  __device__ void put(int from, const Box& box, const Origin& origin) {
    if (static_cast<int>(threadIdx.x) % 32 == from) {
      // Only this lane waits: it can outrun the others by a whole turn of the pipeline, and what they took
      // for the phase before would be the one after.
      if (place_ == 0) {
        mbarrier_wait(shared_address(&control_.empty[at_.stage]), at_.phase ^ 1);
        control_.origins[at_.stage] = origin;
      }
      // Before the arrival, so that who waits for the phase sees it.
      control_.boxes[at_.stage][place_] = box;
      if (place_ == kBoxes - 1) mbarrier_arrive(shared_address(&control_.described[at_.stage]));
    }
    __syncwarp();
    if (++place_ == kBoxes) {
      place_ = 0;
      at_.advance();
    }
  }

  __device__ void load_box(int place, const Origin& origin) {
    const Box& box = control_.boxes[at_.stage][place];
    const std::uint32_t barrier = shared_address(&control_.full[at_.stage]);
    const std::uint32_t to = stages_ + at_.stage * Layout::kStageBytes + place * kPieceBytes;
    const bool columns = (box.flags & Box::kColumns) != 0;
    const CUtensorMap* keys = columns ? &maps_.column_keys : &maps_.k;
    const CUtensorMap* values = columns ? &maps_.column_values : &maps_.v;
    const int head = columns ? 0 : origin.kv_head;
    const int token = columns ? origin.first_column + box.start : box.start;
    const int sequence = columns ? 0 : origin.sequence;
    for (int piece = 0; piece < kDim / kPieceColumns; ++piece) {
      copy_tensor_4d(to + piece * kBoxes * kPieceBytes, keys, barrier, piece * kPieceColumns, head,
                     token, sequence);
    }
    for (int piece = 0; piece < kVDim / kPieceColumns; ++piece) {
      copy_tensor_4d(to + Layout::kKeyBytes + piece * kBoxes * kPieceBytes, values, barrier,
                     piece * kPieceColumns, head, token, sequence);
    }
  }

  const Problem& problem_;
  const DeviceIndex& given_;
  const DeviceIndex& index_;
  const Maps& maps_;
  typename Layout::Control& control_;
  std::uint32_t q_;
  std::uint32_t stages_;
  Cursor<Layout::kStages> at_;
  int place_ = 0;  // of the stage's boxes
};

template <class T, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ DeviceIndex given,
           const __grid_constant__ Maps maps, int* tickets) {
  using Layout = Shared<S>;
  // Other pairs of boxes are for dense tiles: with this the compiler knows.
  const DeviceIndex index = S::kBoxes == 2 && !S::kBlocks ? DeviceIndex() : given;
  extern __shared__ char memory[];
  char* aligned = memory + (1024 - shared_address(memory) % 1024) % 1024;
  char* q = aligned;
  char* stages = aligned + Layout::kQBytes;
  auto& control = *reinterpret_cast<typename Layout::Control*>(
      aligned + Layout::kQBytes + Layout::kStages * Layout::kStageBytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      mbarrier_init(shared_address(&control.described[stage]), 1);
      mbarrier_init(shared_address(&control.full[stage]), 1);
      mbarrier_init(shared_address(&control.empty[stage]), S::kConsumers * 4);
    }
    mbarrier_init(shared_address(&control.q_full), 1);
    mbarrier_init(shared_address(&control.q_empty), S::kConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 0) {
    release_registers<S::kProducerRegisters>();
    Producer<S> producer(problem, given, index, maps, control, shared_address(q),
                         shared_address(stages));
    if (threadIdx.x < 32) producer.walk(tickets);
    if (threadIdx.x == 32) producer.fetch();
  } else {
    take_registers<S::kConsumerRegisters>();
    // A box of a block says all that its rows have to know.
    const DeviceIndex of_rows = S::kBlocks ? DeviceIndex() : index;
    Consumer<T, S> consumer(problem, of_rows, control, shared_address(q), stages, warpgroup - 1);
    consumer.run(tickets + 1);
  }
}

// Boxes of 64 tokens x 64 dims of one head.
CUtensorMap tensor_map(const DeviceTensor& tensor, std::int64_t dim, std::int64_t heads,
                       std::int64_t tokens, std::int64_t batch) {
  if (tokens == 0 || tensor.data == nullptr) return {};
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batch)};
  // A stride along an axis of extent 1 is never followed, but must be legal.
  const auto bytes = [&](std::int64_t stride, std::int64_t extent) {
    return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 16);
  };
  const cuuint64_t strides[3] = {bytes(tensor.head_stride, heads),
                                 bytes(tensor.token_stride, tokens),
                                 bytes(tensor.batch_stride, batch)};
  const cuuint32_t box[4] = {kPieceColumns, 1, kBoxKeys, 1};
  return encode_tensor_map(tensor, 4, sizes, strides, box);
}

DeviceTensor dense_rows(char* data, std::int64_t dim, DType dtype) {
  DeviceTensor tensor;
  tensor.data = data;
  tensor.token_stride = dim;
  tensor.dtype = dtype;
  return tensor;
}

template <class T, class S>
void launch(const Problem& problem, const DeviceIndex& index, const Maps& maps, int* tickets,
            cudaStream_t stream) {
  constexpr int kBytes = Shared<S>::kBytes;
  const auto kernel = attend<T, S>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<multiprocessors(), S::kThreads, kBytes, stream>>>(problem, index, maps, tickets);
  check(cudaGetLastError(), "starting the sm_90a attention kernel");
}

// Head dims for which two boxes at a time are taken where hardly any box is one group's alone: that
// halves the cost of a step.
template <class T, int kDim, int kDenseConsumers>
void launch_small(const Problem& problem, const DeviceIndex& index, const Maps& maps, int* tickets,
                  cudaStream_t stream) {
  if (index.block_pairs) {
    return launch<T, Shape<kDim, kDim, 2, 2, true>>(problem, index, maps, tickets, stream);
  }
  if (index.heads == nullptr || index.dense_apart) {
    launch<T, Shape<kDim, kDim, 2, kDenseConsumers>>(problem, index, maps, tickets, stream);
  }
  if (index.heads == nullptr) return;
  if (index.dense_apart) {
    check(cudaMemsetAsync(tickets, 0, sizeof(int), stream), "clearing a ticket");
  }
  launch<T, Shape<kDim, kDim, 1, 2>>(problem, index, maps, tickets, stream);
}

template <class T>
void launch_dims(const Problem& problem, DeviceIndex index, const Maps& maps, int* tickets,
                 cudaStream_t stream) {
  const int larger = std::max(problem.dim, problem.v_dim);
  if (larger <= 64) return launch_small<T, 64, 3>(problem, index, maps, tickets, stream);
  if (larger <= 128) return launch_small<T, 128, 2>(problem, index, maps, tickets, stream);
  index.dense_apart = false;
  if (larger <= 192 && problem.v_dim <= 128) {
    return launch<T, Shape<192, 128, 1, 2>>(problem, index, maps, tickets, stream);
  }
  if (larger <= 192) return launch<T, Shape<192, 192, 1, 2>>(problem, index, maps, tickets, stream);
  return launch<T, Shape<256, 256, 1, 2>>(problem, index, maps, tickets, stream);
}

bool bulk_copies_follow(const DeviceTensor& tensor, std::int64_t dim, std::int64_t heads,
                        std::int64_t tokens, std::int64_t batch) {
  const auto legal = [](std::int64_t stride, std::int64_t extent) {
    return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 39));
  };
  return dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         legal(tensor.head_stride, heads) && legal(tensor.token_stride, tokens) &&
         legal(tensor.batch_stride, batch);
}

}  // namespace

bool sm90_takes(const Problem& p) {
  return p.q.dtype != DType::kF32 && p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype &&
         p.block_table == nullptr && p.kv_tokens > 0 &&
         bulk_copies_follow(p.q, p.dim, p.q_heads, p.q_tokens, p.batch) &&
         bulk_copies_follow(p.k, p.dim, p.kv_heads, p.kv_tokens, p.batch) &&
         bulk_copies_follow(p.v, p.v_dim, p.kv_heads, p.kv_tokens, p.batch);
}

void sm90_attention(const Problem& p, const DeviceIndex& index, const GatheredColumns& columns,
                    int* tickets, cudaStream_t stream) {
  Maps maps;
  maps.q = tensor_map(p.q, p.dim, p.q_heads, p.q_tokens, p.batch);
  maps.k = tensor_map(p.k, p.dim, p.kv_heads, p.kv_tokens, p.batch);
  maps.v = tensor_map(p.v, p.v_dim, p.kv_heads, p.kv_tokens, p.batch);
  maps.column_keys =
      tensor_map(dense_rows(columns.keys, p.dim, p.k.dtype), p.dim, 1, index.column_capacity, 1);
  maps.column_values = tensor_map(dense_rows(columns.values, p.v_dim, p.v.dtype), p.v_dim, 1,
                                  index.column_capacity, 1);
  check(cudaMemsetAsync(tickets, 0, kTickets * sizeof(int), stream), "clearing tickets");
  if (p.q.dtype == DType::kBF16) {
    launch_dims<__nv_bfloat16>(p, index, maps, tickets, stream);
  } else {
    launch_dims<__half>(p, index, maps, tickets, stream);
  }
  repair_non_finite(p, index, tickets + 1, tickets + 2, stream);
}

}  // namespace minference::cuda
