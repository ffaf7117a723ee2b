#include "support/recall_oracle.h"

#include "attention/reference/reference.h"

namespace minference::test {

std::vector<double> exact_recall(const Problem& problem, const RowSample& sample) {
  const AttentionInput input = problem.input();
  std::vector<double> recall;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t q_len = query_length(input, b);
    const std::int64_t kv_len = key_length(input, b);
    const std::int64_t rows = sample.count(q_len);
    for (std::int64_t h = 0; h < input.q.heads(); ++h) {
      const std::vector<std::uint8_t> mask =
          explicit_mask(input, problem.params, b, h, problem.index());
      double sum = 0;
      std::int64_t counted = 0;
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t row = RowSample::row(i, rows, q_len);
        const std::vector<double> p = row_probabilities(input, problem.params, b, h, row);
        double seen = 0;
        double kept = 0;
        for (std::int64_t key = 0; key < kv_len; ++key) {
          seen += p[key];
          if (mask[row * kv_len + key] != 0) kept += p[key];
        }
        if (seen == 0) continue;
        sum += kept / seen;
        counted += 1;
      }
      recall.push_back(counted == 0 ? 1.0 : sum / static_cast<double>(counted));
    }
  }
  return recall;
}

}  // namespace minference::test
