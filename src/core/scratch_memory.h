// Scratch memory: cache-line aligned blocks, of which large ones are kept for the next call.
#pragma once

#include <cstddef>

namespace minference {

inline constexpr std::size_t kScratchAlignment = 64;
// Blocks of this size and more are kept when they are released, up to kKeptScratchBytes of a process
// together. From the system each call would get fresh pages, and clearing them for the packed keys of
// a chunk takes longer than packing.
inline constexpr std::size_t kLargeScratchBytes = std::size_t{1} << 20;
inline constexpr std::size_t kKeptScratchBytes = std::size_t{64} << 20;

// At least `bytes`, not initialised. Thread-safe, like release_scratch().
void* take_scratch(std::size_t bytes);
// `bytes` as they were asked for; null does nothing.
void release_scratch(void* memory, std::size_t bytes) noexcept;

}  // namespace minference
