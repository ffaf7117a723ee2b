#include <cstdio>
#include <cstring>

#include "minference/cuda.h"
#include "minference/error.h"
#include "minference/version.h"

int main() {
  std::puts(minference::version());
  try {
    std::printf("CUDA devices: %zu\n", minference::cuda_devices().size());
  } catch (const minference::Error& e) {
    std::puts(e.what());
  }
  return std::strcmp(minference::version(), MINFERENCE_VERSION);
}
