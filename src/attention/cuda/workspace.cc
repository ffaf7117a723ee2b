#include "attention/cuda/workspace.h"

#include <map>
#include <mutex>

#include "attention/cuda/check.h"
#include "attention/cuda/send.h"

namespace minference::cuda {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kSlabBytes = std::int64_t{64} << 10;

// Memory that a device's pool keeps when nobody uses it: without, every call after the host waited
// would have its memory mapped anew, which takes longer than the rest of the call.
constexpr std::uint64_t kKeptBytes = std::uint64_t{256} << 20;

// Our own pool of the current device: the default one belongs to the host's program.
cudaMemPool_t pool() {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  const std::lock_guard lock(mutex);
  const auto found = pools.find(device);
  if (found != pools.end()) return found->second;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  cudaMemPool_t made = nullptr;
  check(cudaMemPoolCreate(&made, &properties), "creating a memory pool");
  std::uint64_t kept = kKeptBytes;
  check(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &kept),
        "setting up a memory pool");
  return pools[device] = made;
}

}  // namespace

Workspace::~Workspace() {
  // An error here is one of earlier work in the stream, and is reported by the next call.
  for (char* allocation : allocations_) cudaFreeAsync(allocation, stream_);
}

char* Workspace::allocate(std::int64_t bytes) {
  const std::int64_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (padded > kSlabBytes / 4) return take_from_pool(bytes);
  if (padded > slab_left_) {
    slab_ = take_from_pool(kSlabBytes);
    slab_left_ = kSlabBytes;
  }
  char* piece = slab_;
  slab_ += padded;
  slab_left_ -= padded;
  return piece;
}

char* Workspace::take_from_pool(std::int64_t bytes) {
  void* data = nullptr;
  allocations_.reserve(allocations_.size() + 1);
  check(cudaMallocFromPoolAsync(&data, static_cast<std::size_t>(bytes), pool(), stream_),
        ("allocating " + std::to_string(bytes) + " bytes of workspace").c_str());
  allocations_.push_back(static_cast<char*>(data));
  return allocations_.back();
}

char* Workspace::upload_bytes(const void* from, std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  char* to = allocate(bytes);
  constexpr std::int64_t kFewLaunches = 4;
  bool sends = bytes <= kFewLaunches * kSendBytes;
  if (!sends) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream_, &capture), "asking whether a stream is captured");
    sends = capture != cudaStreamCaptureStatusNone;
  }
  if (sends) {
    send(from, bytes, to, stream_);
  } else {
    // Pageable memory has been read when this returns.
    check(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "copying a call's lengths or index to the device");
  }
  return to;
}

}  // namespace minference::cuda
