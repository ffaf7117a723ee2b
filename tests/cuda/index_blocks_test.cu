// block_sparse on the device against the CPU.
#include "method_index.h"

namespace minference::cuda_test {
namespace {

int failures = 0;

void check_case(const Shape& shape, std::int64_t top_k, const Fill& values, bool exact) {
  if (!check_index("block_sparse", {{"top_k", static_cast<double>(top_k)}}, shape, values, exact)) {
    ++failures;
  }
}

void check_all() {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    // Means of 64 small integers and their products are exact, ties included.
    check_case(
        {.name = "exact",
         .q_tokens = 2048,
         .kv_tokens = 4096,
         .q_heads = 4,
         .kv_heads = 2,
         .dim = 64,
         .dtype = dtype,
         .scale = 1},
        9,
        [](bool is_key, int b, int t, int h, int d) {
          return std::floor(4 * hashed(is_key ? 1 : 0, b, t, h, d)) - 2;
        },
        true);
  }
  const auto check = [&](const Shape& shape, std::int64_t top_k) {
    check_case(shape, top_k, random_fill(7, shape.dim), false);
  };
  check({.name = "mha 64", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 3, .kv_heads = 3}, 10);
  check({.name = "gqa 4 d 128",
         .q_tokens = 9000,
         .kv_tokens = 9000,
         .q_heads = 8,
         .kv_heads = 2,
         .dim = 128},
        30);
  check(
      {.name = "chunk", .q_tokens = 555, .kv_tokens = 7001, .q_heads = 7, .kv_heads = 1, .dim = 96},
      20);
  check({.name = "dim 256",
         .q_tokens = 900,
         .kv_tokens = 5000,
         .q_heads = 4,
         .kv_heads = 1,
         .dim = 256},
        20);
  check(
      {.name = "dim 8", .q_tokens = 900, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 1, .dim = 8},
      20);
  check({.name = "f32",
         .q_tokens = 900,
         .kv_tokens = 3000,
         .q_heads = 2,
         .kv_heads = 1,
         .dim = 72,
         .dtype = DType::kF32},
        20);
  check({.name = "only forced", .q_tokens = 777, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2},
        1);
  check({.name = "one row", .q_tokens = 1, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2}, 10);
  check({.name = "short", .q_tokens = 40, .kv_tokens = 40, .q_heads = 2, .kv_heads = 2}, 100);
  check({.name = "large budget", .q_tokens = 900, .kv_tokens = 900, .q_heads = 2, .kv_heads = 2},
        100);
  check(ragged_shape(), 10);
  check({.name = "window",
         .q_tokens = 600,
         .kv_tokens = 4000,
         .q_heads = 2,
         .kv_heads = 1,
         .window = 900},
        8);
  check({.name = "soft cap",
         .q_tokens = 600,
         .kv_tokens = 4000,
         .q_heads = 2,
         .kv_heads = 1,
         .soft_cap = 20,
         .scale = 0.3F},
        10);
  check({.name = "not causal",
         .q_tokens = 600,
         .kv_tokens = 4000,
         .q_heads = 2,
         .kv_heads = 1,
         .causal = false},
        10);
  check({.name = "more rows than keys",
         .q_tokens = 900,
         .kv_tokens = 600,
         .q_heads = 2,
         .kv_heads = 1},
        4);
  for (const Shape& shape : storage_shapes(600, 4000)) check(shape, 10);
}

void time_all() {
  for (const int tokens : {8192, 32768, 131072}) time_index("block_sparse", tokens);
}

}  // namespace
}  // namespace minference::cuda_test

int main(int argc, char** argv) {
  using namespace minference::cuda_test;  // NOLINT(google-build-using-namespace)
  return run_index_test(argc, argv, failures, check_all, time_all);
}
