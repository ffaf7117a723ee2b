#include "llama/ggml_weight.h"

namespace minference::llama_host {

std::optional<WeightFormat> weight_format(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return WeightFormat::kF32;
    case GGML_TYPE_F16:
      return WeightFormat::kF16;
    case GGML_TYPE_BF16:
      return WeightFormat::kBF16;
    case GGML_TYPE_Q4_0:
      return WeightFormat::kQ4_0;
    case GGML_TYPE_Q4_1:
      return WeightFormat::kQ4_1;
    case GGML_TYPE_Q5_0:
      return WeightFormat::kQ5_0;
    case GGML_TYPE_Q5_1:
      return WeightFormat::kQ5_1;
    case GGML_TYPE_Q8_0:
      return WeightFormat::kQ8_0;
    case GGML_TYPE_Q4_K:
      return WeightFormat::kQ4K;
    case GGML_TYPE_Q5_K:
      return WeightFormat::kQ5K;
    case GGML_TYPE_Q6_K:
      return WeightFormat::kQ6K;
    default:
      return std::nullopt;
  }
}

GgmlWeight::GgmlWeight(const ggml_tensor* tensor, WeightFormat format, IsaLevel level)
    : tensor_(tensor),
      unpack_blocks_(unpacker(format, level)),
      block_elements_(block_elements(format)),
      block_bytes_(block_bytes(format)) {}

LinearWeight GgmlWeight::linear_weight() const {
  return {tensor_->ne[1], tensor_->ne[0], unpack, this};
}

void GgmlWeight::unpack(const void* self, std::int64_t row, std::int64_t begin, std::int64_t count,
                        float* out) {
  const auto& weight = *static_cast<const GgmlWeight*>(self);
  const char* data = static_cast<const char*>(weight.tensor_->data) +
                     static_cast<std::size_t>(row) * weight.tensor_->nb[1] +
                     begin / weight.block_elements_ * weight.block_bytes_;
  weight.unpack_blocks_(data, count / weight.block_elements_, out);
}

}  // namespace minference::llama_host
