// attention_cpu() at every ISA level against the fp64 reference, over the shared sweep.
#include <gtest/gtest.h>

#include "attention/cpu/executor.h"
#include "attention/validate.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

void sweep(const std::vector<Case>& cases) {
  const Runner run = [](const AttentionInput& input, const AttentionParams& params,
                        const AttentionOutput& output, const SparseIndex* index, IsaLevel level) {
    validate(input, params, output);
    if (index != nullptr) {
      validate(*index, input.q.batch(), input.q.heads(), input.q.tokens(), key_capacity(input));
    }
    return attention_cpu(input, params, output, index, level);
  };
  const std::vector<IsaLevel> levels = available_isa_levels();
  for (std::size_t i = 0; i < cases.size(); i += sweep_stride()) {
    expect_matches_reference(cases[i], run, levels);
  }
}

TEST(AttentionOracle, Shapes) { sweep(shape_cases()); }
TEST(AttentionOracle, ManyKeys) { sweep(long_cases()); }
TEST(AttentionOracle, Storage) { sweep(storage_cases()); }
TEST(AttentionOracle, Values) { sweep(value_cases()); }
TEST(AttentionOracle, Patterns) { sweep(pattern_cases()); }
TEST(AttentionOracle, Features) { sweep(feature_cases()); }
TEST(AttentionOracle, RandomFirst) { sweep(random_cases(150, 20240702)); }
TEST(AttentionOracle, RandomSecond) { sweep(random_cases(150, 20250811)); }

}  // namespace
}  // namespace minference::test
