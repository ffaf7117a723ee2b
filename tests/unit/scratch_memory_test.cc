#include "core/scratch_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/parallel.h"

namespace minference {
namespace {

// The size of a block that nothing else in this program asks for.
constexpr std::size_t kOdd = 7 * kLargeScratchBytes + 4321;

TEST(ScratchMemory, IsAligned) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, kLargeScratchBytes, kOdd}) {
    void* memory = take_scratch(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % kScratchAlignment, 0U) << bytes;
    std::memset(memory, 1, bytes);
    release_scratch(memory, bytes);
  }
  release_scratch(nullptr, 0);
}

TEST(ScratchMemory, LargeBlocksServeTheNextCall) {
  void* first = take_scratch(kOdd);
  void* second = take_scratch(kOdd);
  EXPECT_NE(first, second);
  release_scratch(first, kOdd);
  // A chunk further on in the prompt, a little longer.
  EXPECT_EQ(take_scratch(kOdd + 1000), first);
  release_scratch(first, kOdd + 1000);
  release_scratch(second, kOdd);
}

TEST(ScratchMemory, KeepsNoMoreThanItsLimit) {
  void* oldest = take_scratch(kOdd);
  std::memset(oldest, 1, kOdd);
  release_scratch(oldest, kOdd);
  // One block that fills the limit drives out what was kept before, a larger one is not kept itself.
  for (const std::size_t bytes : {kKeptScratchBytes, kKeptScratchBytes + 1}) {
    release_scratch(take_scratch(bytes), bytes);
  }
  std::vector<void*> blocks(2 * kKeptScratchBytes / kLargeScratchBytes);
  for (void*& block : blocks) block = take_scratch(kLargeScratchBytes);
  for (void* block : blocks) release_scratch(block, kLargeScratchBytes);
}

TEST(ScratchMemory, ThreadsShareIt) {
  parallel_for(400, 4, [](std::int64_t i, int) {
    const std::size_t bytes = kLargeScratchBytes + static_cast<std::size_t>(i % 5) * 100'000;
    auto* memory = static_cast<unsigned char*>(take_scratch(bytes));
    memory[0] = memory[bytes - 1] = static_cast<unsigned char>(i);
    EXPECT_EQ(memory[0], static_cast<unsigned char>(i));
    EXPECT_EQ(memory[bytes - 1], static_cast<unsigned char>(i));
    release_scratch(memory, bytes);
  });
}

}  // namespace
}  // namespace minference
