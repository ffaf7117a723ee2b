#include "attention/cuda/device_kernels.h"

#include <cstdlib>
#include <string>

#include "attention/cuda/check.h"
#include "minference/error.h"

namespace minference::cuda {

int device_kernels(int ordinal, int major) {
  if (major < 8) return 0;
  if (const char* forced = std::getenv("MINFERENCE_FORCE_CUDA")) {
    if (std::string(forced) == "sm80") return 80;
    if (std::string(forced) != "sm90a") {
      throw InvalidArgument("MINFERENCE_FORCE_CUDA is '" + std::string(forced) +
                            "'; legal: sm80, sm90a");
    }
    if (major != 9) {
      throw Unsupported("MINFERENCE_FORCE_CUDA=sm90a on CUDA device " + std::to_string(ordinal) +
                        " of compute capability " + std::to_string(major) + ".x; needed: 9.0");
    }
  }
  return major == 9 ? 90 : 80;
}

int current_kernels() {
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "asking for the current device");
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  const int kernels = device_kernels(ordinal, major);
  if (kernels == 0) {
    throw Unsupported("CUDA device " + std::to_string(ordinal) + " has compute capability " +
                      std::to_string(major) + ".x; needed: 8.0 or newer");
  }
  return kernels;
}

}  // namespace minference::cuda
