// GuardedBuffer: memory that touches an unreadable page and starts full of NaN.
//
// A read or write across the fence ends the test at once, in release builds too. The poison is a
// NaN in every dtype, so that a read of padding inside the buffer shows in the result.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace minference::test {

inline constexpr std::uint16_t kPoison = 0x7FC0;

// Where the unreadable page lies. Memory behind one starts at the page's alignment.
enum class Fence { kBehind, kBefore };

class GuardedBuffer {
 public:
  GuardedBuffer() = default;

  // Room for `words` 16-bit words.
  explicit GuardedBuffer(std::int64_t words, Fence fence = Fence::kBehind) : words_(words) {
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    const std::int64_t bytes = words * 2;
    const std::int64_t usable = (bytes + page - 1) / page * page;
    mapped_ = static_cast<std::size_t>(usable + page);
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::runtime_error("mmap failed");
    base_ = static_cast<char*>(base);
    const bool behind = fence == Fence::kBehind;
    if (mprotect(base_ + (behind ? usable : 0), static_cast<std::size_t>(page), PROT_NONE) != 0) {
      throw std::runtime_error("mprotect failed");
    }
    data_ = reinterpret_cast<std::uint16_t*>(base_ + (behind ? usable - bytes : page));
    std::fill_n(data_, words_, kPoison);
  }
  GuardedBuffer(GuardedBuffer&& other) noexcept { swap(other); }
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  ~GuardedBuffer() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  std::uint16_t* data() const { return data_; }
  std::int64_t words() const { return words_; }

 private:
  void swap(GuardedBuffer& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(words_, other.words_);
  }

  char* base_ = nullptr;
  std::size_t mapped_ = 0;
  std::uint16_t* data_ = nullptr;
  std::int64_t words_ = 0;
};

}  // namespace minference::test
