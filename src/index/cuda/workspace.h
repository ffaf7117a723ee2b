// Workspace: hands out pieces of the caller's device memory, or counts what they would take.
#pragma once

#include <cstdint>

#include "core/checked.h"

namespace minference::cuda {

class Workspace {
 public:
  static constexpr std::int64_t kAlignment = 256;

  // Null: only counts.
  explicit Workspace(void* data = nullptr) : data_(static_cast<char*>(data)) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t begin = used_;
    const std::int64_t bytes =
        checked_mul(count, static_cast<std::int64_t>(sizeof(T)), "a part of the index");
    used_ = checked_add(used_, bytes, "the index") + kAlignment - 1;
    used_ -= used_ % kAlignment;
    return data_ == nullptr ? nullptr : reinterpret_cast<T*>(data_ + begin);
  }

  std::int64_t used() const { return used_; }

 private:
  char* data_;
  std::int64_t used_ = 0;
};

}  // namespace minference::cuda
