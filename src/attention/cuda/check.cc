#include "attention/cuda/check.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "minference/error.h"

namespace minference::cuda {
namespace {

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  return device;
}

// What is known of devices, for all threads.
template <class Key>
struct PerDevice {
  std::mutex mutex;
  std::map<std::pair<int, Key>, int> values;
};

}  // namespace

void check(cudaError_t code, const char* doing) {
  if (code == cudaSuccess) return;
  // Errors of a launch or an allocation are forgotten here, so that the next call starts clean.
  cudaGetLastError();
  throw Error(std::string("CUDA: ") + doing + " failed: " + cudaGetErrorString(code) + " (" +
              cudaGetErrorName(code) + ")");
}

int device_attribute(cudaDeviceAttr attribute) {
  static PerDevice<cudaDeviceAttr> known;
  const int device = current_device();
  const std::lock_guard lock(known.mutex);
  const auto found = known.values.find({device, attribute});
  if (found != known.values.end()) return found->second;
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "asking for a property of the device");
  return known.values[{device, attribute}] = value;
}

int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

void allow_shared_memory(const void* kernel, int bytes) {
  static PerDevice<const void*> allowed;
  const int device = current_device();
  // Never lowered: another thread may be about to start the kernel with more.
  const std::lock_guard lock(allowed.mutex);
  int& most = allowed.values[{device, kernel}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "reserving shared memory");
  most = bytes;
}

}  // namespace minference::cuda
