// AlignedBuffer: cache-line aligned scratch memory that is not initialised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace minference {

template <class T>
class AlignedBuffer {
 public:
  static constexpr std::align_val_t kAlignment{64};

  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t size)
      : data_(static_cast<T*>(
            ::operator new(static_cast<std::size_t>(size) * sizeof(T), kAlignment))),
        size_(size) {}
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { ::operator delete(data_, kAlignment); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return data_[i]; }
  const T& operator[](std::int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace minference
