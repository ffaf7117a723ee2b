#include "attention/cuda/head_parts.h"

namespace minference::cuda {
namespace {

void skip_heads(DeviceTensor& tensor, std::int64_t heads) {
  if (tensor.data != nullptr) tensor.data += heads * tensor.head_stride * dtype_size(tensor.dtype);
}

}  // namespace

std::int64_t index_memory_limit(const Problem& problem) {
  const std::int64_t token_bytes = problem.kv_heads * (problem.dim * dtype_size(problem.k.dtype) +
                                                       problem.v_dim * dtype_size(problem.v.dtype));
  return (std::int64_t{64} << 20) +
         static_cast<std::int64_t>(problem.batch) * problem.kv_tokens * token_bytes / 100;
}

HeadParts::HeadParts(const Problem& problem, std::int64_t limit,
                     const std::function<std::int64_t(const Problem&)>& bytes_of)
    : heads_(problem.q_heads), group_(problem.group), at_a_time_(problem.q_heads) {
  const auto fits = [&] { return bytes_of(problem_of(problem, {0, at_a_time_})) <= limit; };
  for (std::int32_t parts = 2; at_a_time_ > group_ && !fits(); ++parts) {
    at_a_time_ = (problem.kv_heads + parts - 1) / parts * group_;
  }
  for (std::int32_t parts = 2; at_a_time_ > 1 && !fits(); ++parts) {
    at_a_time_ = (group_ + parts - 1) / parts;
  }
}

Problem problem_of(const Problem& problem, const HeadPart& part) {
  Problem result = problem;
  const std::int32_t kv_head = part.first / problem.group;
  result.q_heads = part.count;
  result.kv_heads = part.count < problem.group ? 1 : part.count / problem.group;
  result.group = part.count / result.kv_heads;
  skip_heads(result.q, part.first);
  skip_heads(result.out, part.first);
  skip_heads(result.lse, part.first);
  skip_heads(result.k, kv_head);
  skip_heads(result.v, kv_head);
  if (result.sinks != nullptr) result.sinks += part.first;
  return result;
}

}  // namespace minference::cuda
