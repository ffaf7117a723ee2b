// Fills the kernels' scratch memory with NaN, for every test of this program: a kernel that reads
// what nobody wrote cannot stay unnoticed. Scratch memory is what is allocated with an alignment.
#include <cstdlib>
#include <cstring>
#include <new>

void* operator new(std::size_t size, std::align_val_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<std::size_t>(alignment), size) != 0) {
    throw std::bad_alloc();
  }
  std::memset(memory, 0xFF, size);
  return memory;
}

void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
