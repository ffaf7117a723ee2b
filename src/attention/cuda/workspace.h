// Workspace: the device memory of one call, from a stream-ordered pool, and host data copied there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace minference::cuda {

class Workspace {
 public:
  // Memory of the current device, which must not change during this object's life.
  explicit Workspace(cudaStream_t stream) : stream_(stream) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Memory until the end of this object's life in the stream's order; aligned to 256 bytes.
  char* allocate(std::int64_t bytes);

  // A copy of the values, which have been read when this returns; null when there are none.
  template <class T>
  const T* upload(std::span<const T> values) {
    static_assert(sizeof(T) % 4 == 0);
    return reinterpret_cast<const T*>(
        upload_bytes(values.data(), static_cast<std::int64_t>(values.size_bytes())));
  }

 private:
  char* upload_bytes(const void* from, std::int64_t bytes);
  char* take_from_pool(std::int64_t bytes);

  cudaStream_t stream_;
  std::vector<char*> allocations_;
  char* slab_ = nullptr;  // what small pieces are cut from
  std::int64_t slab_left_ = 0;
};

}  // namespace minference::cuda
