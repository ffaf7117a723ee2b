#include "core/scratch_memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <new>

namespace minference {
namespace {

constexpr std::align_val_t kAlignment{kScratchAlignment};

void* allocate(std::size_t bytes) { return ::operator new(bytes, kAlignment); }
void deallocate(void* memory) { ::operator delete(memory, kAlignment); }

// Sizes of large blocks: eight to an octave, so that a block serves chunks of a growing prompt too.
std::size_t size_class(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

// Released blocks, the oldest first. Whoever finds it in use goes to the system instead of waiting: in
// a forked child nobody might ever give it back.
class KeptBlocks {
 public:
  // Null when there is none of that size.
  void* take(std::size_t bytes) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    // The newest one is the likeliest to be in a cache.
    for (std::size_t i = count_; i-- > 0;) {
      if (blocks_[i].bytes == bytes) return remove(i).memory;
    }
    return nullptr;
  }

  // False when the block was not kept.
  bool keep(void* memory, std::size_t bytes) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock || bytes > kKeptScratchBytes) return false;
    while (count_ == blocks_.size() || total_ + bytes > kKeptScratchBytes)
      deallocate(remove(0).memory);
    blocks_[count_++] = {memory, bytes};
    total_ += bytes;
    return true;
  }

 private:
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };

  Block remove(std::size_t i) {
    const Block block = blocks_[i];
    std::copy(blocks_.begin() + i + 1, blocks_.begin() + count_, blocks_.begin() + i);
    --count_;
    total_ -= block.bytes;
    return block;
  }

  std::mutex mutex_;
  std::array<Block, kKeptScratchBytes / kLargeScratchBytes> blocks_;
  std::size_t count_ = 0;
  std::size_t total_ = 0;  // bytes
};

// Never destroyed: buffers of static objects may be released later.
KeptBlocks& kept_blocks() {
  static auto* const blocks = new KeptBlocks;
  return *blocks;
}

}  // namespace

void* take_scratch(std::size_t bytes) {
  if (bytes < kLargeScratchBytes) return allocate(bytes);
  bytes = size_class(bytes);
  void* memory = kept_blocks().take(bytes);
  return memory != nullptr ? memory : allocate(bytes);
}

void release_scratch(void* memory, std::size_t bytes) noexcept {
  if (memory == nullptr) return;
  if (bytes < kLargeScratchBytes || !kept_blocks().keep(memory, size_class(bytes))) {
    deallocate(memory);
  }
}

}  // namespace minference
