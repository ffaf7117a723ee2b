#include "attention/cuda/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "minference/error.h"
#include "minference/version.h"

namespace minference {
namespace {

constexpr const char* kFile = "libminference_cuda.so";

// The folder of the program or shared library that this file was linked into.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0) return {};
  std::error_code ignored;
  const std::filesystem::path file = std::filesystem::canonical(info.dli_fname, ignored);
  return file.parent_path();
}

std::string library_path() {
  const char* given = std::getenv("MINFERENCE_CUDA_LIBRARY");
  if (given != nullptr && *given != '\0') return given;
  const std::filesystem::path beside = own_folder() / kFile;
  std::error_code ignored;
  // By name alone, the loader also looks into the run path of the binary that this file was linked
  // into: the CMake package puts the installed library's folder there.
  return std::filesystem::exists(beside, ignored) ? beside.string() : kFile;
}

const cuda::Library& load() {
  const std::string path = library_path();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Unsupported("no CUDA kernels: " + std::string(reason == nullptr ? path : reason));
  }
  const auto entry = reinterpret_cast<decltype(&cuda::minference_cuda_library)>(
      dlsym(handle, "minference_cuda_library"));
  if (entry == nullptr) throw Unsupported("no CUDA kernels: " + path + " is another library");
  const cuda::Library* found = entry();
  if (std::string(found->version) != version()) {
    throw Unsupported("no CUDA kernels: " + path + " is of version " + found->version +
                      ", this library of " + version());
  }
  return *found;
}

const cuda::Library& library() {
  static const cuda::Library& loaded = load();  // a failure is tried again by the next call
  return loaded;
}

void rethrow(const cuda::Failure& failure) {
  switch (failure.kind) {
    case cuda::Failure::Kind::kNone:
      return;
    case cuda::Failure::Kind::kInvalidArgument:
      throw InvalidArgument(failure.message);
    case cuda::Failure::Kind::kUnsupported:
      throw Unsupported(failure.message);
    case cuda::Failure::Kind::kError:
      throw Error(failure.message);
  }
}

// 16-bit tensors are multiplied by the tensor cores in their own type: never silently.
void require_precision(const AttentionInput& input, const AttentionParams& params) {
  if (params.precision != Precision::kF32) return;
  const std::pair<const char*, DType> dtypes[] = {
      {"q", input.q.dtype}, {"k", input.k.dtype}, {"v", input.v.dtype}};
  for (const auto& [name, dtype] : dtypes) {
    if (dtype == DType::kF32) continue;
    throw Unsupported("precision is f32 and " + std::string(name) + " is " + dtype_name(dtype) +
                      "; legal on " + device_name(input.q.device) +
                      ": f32 tensors, or precision auto");
  }
}

}  // namespace

std::vector<CudaDevice> cuda_devices() {
  std::vector<CudaDevice> devices;
  cuda::Failure failure;
  library().devices(devices, failure);
  rethrow(failure);
  return devices;
}

Stats attention_cuda(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const cuda::IndexSource& source) {
  require_precision(input, params);
  Stats stats;
  cuda::Failure failure;
  library().attention(input, params, output, source, stats, failure);
  rethrow(failure);
  return stats;
}

std::unique_ptr<cuda::DevicePlan> plan_cuda(const AttentionInput& input,
                                            const AttentionParams& params,
                                            const cuda::IndexSource& source, Stats& stats) {
  require_precision(input, params);
  cuda::Failure failure;
  std::unique_ptr<cuda::DevicePlan> plan = library().plan(input, params, source, stats, failure);
  rethrow(failure);
  return plan;
}

Stats execute_cuda(const cuda::DevicePlan& plan, const AttentionInput& input,
                   const AttentionParams& params, const AttentionOutput& output) {
  Stats stats;
  cuda::Failure failure;
  plan.execute(input, params, output, stats, failure);
  rethrow(failure);
  return stats;
}

std::vector<double> mass_recall_cuda(const AttentionInput& input, const AttentionParams& params,
                                     const SparseIndex& index, const RowSample& sample) {
  cuda::Failure failure;
  std::vector<double> recall = library().mass_recall(input, params, index, sample, failure);
  rethrow(failure);
  return recall;
}

}  // namespace minference
