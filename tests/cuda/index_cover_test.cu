// xattention and flexprefill on the device against the CPU.
#include "method_index.h"

namespace minference::cuda_test {
namespace {

int failures = 0;

void check_exact(const char* name, const Shape& shape, const MethodOptions& options) {
  const Fill fill = [](bool is_key, int b, int t, int h, int d) {
    return std::floor(4 * hashed(is_key ? 1 : 0, b, t, h, d)) - 2;
  };
  if (!check_index(name, options, shape, fill, true)) ++failures;
}

void check_random(const char* name, const Shape& shape, const MethodOptions& options = {}) {
  if (!check_index(name, options, shape, random_fill(7, shape.dim), false)) ++failures;
}

// Shapes that every method must take.
std::vector<Shape> shapes() {
  std::vector<Shape> all{
      {.name = "mha 64", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 3, .kv_heads = 3},
      {.name = "gqa 4 d 128",
       .q_tokens = 5000,
       .kv_tokens = 5000,
       .q_heads = 8,
       .kv_heads = 2,
       .dim = 128},
      {.name = "f16", .q_tokens = 2048, .kv_tokens = 4096, .q_heads = 2, .dtype = DType::kF16},
      {.name = "f32", .q_tokens = 2048, .kv_tokens = 4096, .q_heads = 2, .dtype = DType::kF32},
      {.name = "chunk", .q_tokens = 555, .kv_tokens = 7001, .q_heads = 7, .dim = 96},
      {.name = "dim 256", .q_tokens = 900, .kv_tokens = 5000, .q_heads = 4, .dim = 256},
      {.name = "dim 8", .q_tokens = 900, .kv_tokens = 3000, .q_heads = 2, .dim = 8},
      {.name = "one row", .q_tokens = 1, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2},
      {.name = "short", .q_tokens = 40, .kv_tokens = 40, .q_heads = 2, .kv_heads = 2},
      ragged_shape(),
      {.name = "window", .q_tokens = 600, .kv_tokens = 4000, .q_heads = 2, .window = 900},
      {.name = "soft cap",
       .q_tokens = 600,
       .kv_tokens = 4000,
       .q_heads = 2,
       .soft_cap = 20,
       .scale = 0.3F},
      {.name = "not causal", .q_tokens = 600, .kv_tokens = 4000, .q_heads = 2, .causal = false},
      {.name = "more rows than keys", .q_tokens = 900, .kv_tokens = 600, .q_heads = 2}};
  for (const Shape& shape : storage_shapes(600, 4000)) all.push_back(shape);
  return all;
}

// With small integers for scores that are exact.
const Shape exact{.name = "exact",
                  .q_tokens = 2048,
                  .kv_tokens = 4096,
                  .q_heads = 4,
                  .kv_heads = 2,
                  .dim = 64,
                  .scale = 0.25F};

void check_xattention() {
  for (const double threshold : {0.0, 0.31, 0.77}) {
    check_exact("xattention", exact, {{"threshold", threshold}});
  }
  for (const Shape& shape : shapes()) check_random("xattention", shape);
  Shape options{.name = "options", .q_tokens = 1999, .kv_tokens = 3001, .q_heads = 2};
  for (const double stride : {1, 2, 4, 16, 32, 64}) {
    for (const double block : {64, 192, 1024}) {
      options.name = "stride " + std::to_string(static_cast<int>(stride)) + " block " +
                     std::to_string(static_cast<int>(block));
      check_random("xattention", options,
                   {{"stride", stride}, {"block_size", block}, {"threshold", 0.7}, {"norm", 1.5}});
    }
  }
}

// Keys and queries whose blocks look alike, so that pooled scores tell the truth.
float alike_in_blocks(bool is_key, int b, int t, int h, int d) {
  const float value = 3 * hashed(is_key ? 11 : 12, b, t / 128, h, d) - 1.5F;
  return value + 0.1F * hashed(is_key ? 13 : 14, b, t, h, d);
}

void check_flexprefill() {
  for (const double gamma : {0.0, 0.31, 0.77}) {
    check_exact("flexprefill", exact, {{"gamma", gamma}});
    check_exact("flexprefill", exact, {{"gamma", gamma}, {"tau", 1}});
  }
  for (Shape shape : shapes()) {
    const std::string name = shape.name;
    check_random("flexprefill", shape, {{"gamma", 0.7}, {"tau", 0}});
    shape.name = name + ", maps";
    check_random("flexprefill", shape, {{"gamma", 0.7}, {"tau", 1}});
  }
  Shape shape{.name = "either", .q_tokens = 4000, .kv_tokens = 4000, .q_heads = 4};
  if (!check_index("flexprefill", {{"tau", 0.3}}, shape, alike_in_blocks, false)) ++failures;
  shape.name = "even map";  // all entries of a row are equal
  shape.q_heads = 1;
  if (!check_index(
          "flexprefill", {{"tau", 1}, {"gamma", 0.5}}, shape,
          [](bool, int, int, int, int) { return 1.0F; }, true)) {
    ++failures;
  }
  Shape options{.name = "options", .q_tokens = 1999, .kv_tokens = 6001, .q_heads = 2};
  for (const double block : {64, 192, 1024}) {
    for (const double least : {0, 1000}) {
      for (const double most : {0, 1500}) {
        for (const double tau : {0, 1}) {
          options.name = "block " + std::to_string(static_cast<int>(block)) + " from " +
                         std::to_string(static_cast<int>(least)) + " to " +
                         std::to_string(static_cast<int>(most));
          check_random("flexprefill", options,
                       {{"block_size", block},
                        {"min_budget", least},
                        {"max_budget", most},
                        {"tau", tau},
                        {"gamma", 0.6}});
        }
      }
    }
  }
}

void check_all() {
  check_xattention();
  check_flexprefill();
}

void time_all() {
  for (const int tokens : {8192, 32768, 131072}) {
    time_index("xattention", tokens);
    time_index("flexprefill", tokens);
  }
}

}  // namespace
}  // namespace minference::cuda_test

int main(int argc, char** argv) {
  using namespace minference::cuda_test;  // NOLINT(google-build-using-namespace)
  return run_index_test(argc, argv, failures, check_all, time_all);
}
