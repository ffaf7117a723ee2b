#include "attention/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "attention/cuda/check.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: nothing links the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "looking for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      throw Unsupported(
          "this CUDA driver has no cuTensorMapEncodeTiled; needed: driver 525 or newer");
    }
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap encode_tensor_map(const DeviceTensor& tensor, int axes, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box) {
  CUtensorMap map{};
  constexpr cuuint32_t kSteps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode_tiled()(&map,
                     tensor.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     static_cast<cuuint32_t>(axes), tensor.data, sizes, strides, box, kSteps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Unsupported("the CUDA driver refused a tensor map (CUresult " +
                      std::to_string(static_cast<int>(result)) + ")");
  }
  return map;
}

}  // namespace minference::cuda
