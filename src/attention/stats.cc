#include <algorithm>

#include "minference/attention.h"

namespace minference {

void Stats::add(const Stats& other) {
  if (method.empty()) {
    method = other.method;
    isa = other.isa;
    cuda_kernels = other.cuda_kernels;
  } else if (!other.method.empty()) {
    // Calls of different kinds are both named, once each; the slower level speaks for the sum.
    if (("+" + method + "+").find("+" + other.method + "+") == std::string::npos) {
      method += "+" + other.method;
    }
    isa = std::min(isa, other.isa);
    cuda_kernels = std::min(cuda_kernels, other.cuda_kernels);
  }
  kept_pairs += other.kept_pairs;
  causal_pairs += other.causal_pairs;
  index_seconds += other.index_seconds;
  kernel_seconds += other.kernel_seconds;
  guard_seconds += other.guard_seconds;
  recall_sum += other.recall_sum;
  recall_count += other.recall_count;
  for (const auto& [reason, times] : other.fallbacks) fallbacks[reason] += times;
}

const char* Stats::kernels() const {
  if (cuda_kernels == 0) return isa_name(isa);
  return cuda_kernels == 90 ? "sm_90a" : "sm_80";
}

}  // namespace minference
