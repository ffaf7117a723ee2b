// Each warp multiplies its rows of a tile with boxes of keys and values that all warps of the block
// copy asynchronously into a ring of slots, keys and values in turn. Warp 0 also walks the boxes.
// Thread blocks are persistent and draw their tiles from a ticket.
#include "attention/cuda/sm80_attention.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "attention/cuda/f32_attention.h"
#include "attention/cuda/sm80_block.cuh"

namespace minference::cuda {
namespace {

using namespace sm80;  // NOLINT(google-build-using-namespace): this file is its front

template <class T, int kDim, int kVDim>
__global__ void __launch_bounds__(Shape<kDim, kVDim>::kThreads, Shape<kDim, kVDim>::kBlocks)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ DeviceIndex index,
           const __grid_constant__ Launch launch, int* tickets) {
  extern __shared__ __align__(128) char memory[];
  Block<T, kDim, kVDim> block(problem, index, launch, *reinterpret_cast<Control*>(memory),
                              memory + sizeof(Control));
  block.run(tickets);
}

template <class T, int kDim, int kVDim>
void launch(const Problem& problem, const DeviceIndex& index, Launch launch, int* tickets,
            cudaStream_t stream) {
  using S = Shape<kDim, kVDim>;
  constexpr int kReserved = 1024;  // of each block's shared memory, the driver's
  const int block_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  constexpr int kFixed = sizeof(Control) + S::kQBytes;
  static_assert(kFixed + 2 * S::kSlotBytes <= 99 * 1024, "the least of any device");
  // As many slots as leave room for all blocks; two at least, with fewer blocks if need be.
  const int room = std::min(block_limit, limit / S::kBlocks - kReserved);
  launch.slots = room >= kFixed + kMaxSlots * S::kSlotBytes ? kMaxSlots : 2;
  const int bytes = kFixed + launch.slots * S::kSlotBytes;
  const auto kernel = attend<T, kDim, kVDim>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, S::kThreads, bytes),
        "counting thread blocks");
  kernel<<<blocks * multiprocessors(), S::kThreads, bytes, stream>>>(problem, index, launch,
                                                                     tickets);
  check(cudaGetLastError(), "starting attention");
}

template <class T>
void launch(const Problem& problem, const DeviceIndex& index, const Launch& choice, int* tickets,
            cudaStream_t stream) {
  const int dim = problem.dim;
  const int v_dim = problem.v_dim;
  const int largest = std::max(dim, v_dim);
  if (largest <= 64) {
    launch<T, 64, 64>(problem, index, choice, tickets, stream);
  } else if (largest <= 96) {
    launch<T, 96, 96>(problem, index, choice, tickets, stream);
  } else if (largest <= 128) {
    launch<T, 128, 128>(problem, index, choice, tickets, stream);
  } else if (dim <= 192 && v_dim <= 128) {
    launch<T, 192, 128>(problem, index, choice, tickets, stream);
  } else if (largest <= 192) {
    launch<T, 192, 192>(problem, index, choice, tickets, stream);
  } else {
    launch<T, 256, 256>(problem, index, choice, tickets, stream);
  }
}

bool takes_vectors(const DeviceTensor& tensor, DType dtype, std::int32_t dim) {
  const auto aligned = [](std::int64_t stride) { return stride % 8 == 0; };
  return tensor.dtype == dtype && dim % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && aligned(tensor.batch_stride) &&
         aligned(tensor.token_stride) && aligned(tensor.head_stride);
}

}  // namespace

void sm80_attention(const Problem& problem, const DeviceIndex& index, int* tickets,
                    cudaStream_t stream) {
  const auto all = [&](DType dtype) {
    return problem.q.dtype == dtype && problem.k.dtype == dtype && problem.v.dtype == dtype;
  };
  if (all(DType::kF32)) {
    f32_attention(problem, index, tickets, stream);
    return;
  }
  check(cudaMemsetAsync(tickets, 0, kTickets * sizeof(int), stream), "clearing tickets");
  const DType dtype = all(DType::kF16) ? DType::kF16 : DType::kBF16;
  Launch choice;
  choice.q_vectors = takes_vectors(problem.q, dtype, problem.dim);
  choice.k_vectors = takes_vectors(problem.k, dtype, problem.dim);
  choice.v_vectors = takes_vectors(problem.v, dtype, problem.v_dim);
  if (dtype == DType::kF16) {
    launch<__half>(problem, index, choice, tickets, stream);
  } else {
    launch<__nv_bfloat16>(problem, index, choice, tickets, stream);
  }
  repair_non_finite(problem, index, tickets + 1, tickets + 2, stream);
}

}  // namespace minference::cuda
