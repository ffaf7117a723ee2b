#include "attention/cuda/check.h"

#include <string>

#include "minference/error.h"

namespace minference::cuda {

void check(cudaError_t code, const char* doing) {
  if (code == cudaSuccess) return;
  // Errors of a launch or an allocation are forgotten here, so that the next call starts clean.
  cudaGetLastError();
  throw Error(std::string("CUDA: ") + doing + " failed: " + cudaGetErrorString(code) + " (" +
              cudaGetErrorName(code) + ")");
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "counting multiprocessors");
  return count;
}

}  // namespace minference::cuda
