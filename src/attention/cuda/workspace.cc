#include "attention/cuda/workspace.h"

#include "attention/cuda/check.h"

namespace minference::cuda {

Workspace::~Workspace() {
  // An error here is one of earlier work in the stream, and is reported by the next call.
  for (char* allocation : allocations_) cudaFreeAsync(allocation, stream_);
}

char* Workspace::allocate(std::int64_t bytes) {
  void* data = nullptr;
  allocations_.reserve(allocations_.size() + 1);
  check(cudaMallocAsync(&data, static_cast<std::size_t>(bytes), stream_),
        ("allocating " + std::to_string(bytes) + " bytes of workspace").c_str());
  allocations_.push_back(static_cast<char*>(data));
  return allocations_.back();
}

char* Workspace::upload_bytes(const void* from, std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  char* to = allocate(bytes);
  // Pageable memory has been read when this returns.
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "copying a call's lengths or index to the device");
  return to;
}

}  // namespace minference::cuda
