// AlignedBuffer: an owner of scratch memory (scratch_memory.h), not initialised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/scratch_memory.h"

namespace minference {

template <class T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t size)
      : data_(static_cast<T*>(take_scratch(bytes(size)))), size_(size) {}
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { release_scratch(data_, bytes(size_)); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return data_[i]; }
  const T& operator[](std::int64_t i) const { return data_[i]; }

 private:
  static std::size_t bytes(std::int64_t size) { return static_cast<std::size_t>(size) * sizeof(T); }

  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace minference
