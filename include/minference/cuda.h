// CUDA: which devices this process can use. Attention on them is the same attention(), with tensors
// whose `device` says cuda.
//
// The kernels lie in a shared library of their own, libminference_cuda.so, which is loaded when it is
// first needed: from the path in the environment variable MINFERENCE_CUDA_LIBRARY, from the folder of
// the program or library that this code was linked into, or from the system's library path. Calls are
// asynchronous, in AttentionParams::stream, and may be captured into a CUDA graph, lengths and tables
// with them; memory for the call comes from a stream-ordered pool of the library's own, which keeps up
// to 256 MiB a device between calls. On Hopper (compute capability 9.0) kernels of its own are used,
// elsewhere those for 8.0; MINFERENCE_FORCE_CUDA=sm80 uses the latter everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minference {

struct CudaDevice {
  int ordinal = 0;
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::int64_t memory = 0;  // bytes
  std::string kernels;      // "sm_90a", "sm_80", or empty: too old
};

// The devices of this process. Throws Unsupported with the reason when there are none: no library, no
// driver, or no device.
std::vector<CudaDevice> cuda_devices();

}  // namespace minference
