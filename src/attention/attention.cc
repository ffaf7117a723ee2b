#include "minference/attention.h"

#include "attention/cpu/executor.h"
#include "attention/cuda/library.h"
#include "attention/precision.h"
#include "attention/validate.h"

namespace minference {

bool allows_bf16(const AttentionInput& input, const AttentionParams& params) {
  switch (params.precision) {
    case Precision::kF32:
      return false;
    case Precision::kBF16:
      return true;
    case Precision::kAuto:
      break;
  }
  return input.q.dtype != DType::kF32 || input.k.dtype != DType::kF32 ||
         input.v.dtype != DType::kF32;
}

Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const SparseIndex* index) {
  validate(input, params, output);
  if (index != nullptr) {
    validate(*index, input.q.batch(), input.q.heads(), input.q.tokens(), key_capacity(input));
  }
  if (input.q.device.kind == Device::Kind::kCuda) {
    return attention_cuda(input, params, output, {.index = index, .recipe = nullptr, .guard = {}});
  }
  return attention_cpu(input, params, output, index, choose_isa(allows_bf16(input, params)));
}

}  // namespace minference
