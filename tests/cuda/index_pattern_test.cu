// vertical_slash and minference on the device against the CPU.
#include "index_support.h"
#include "methods/head_patterns.h"

namespace minference::cuda_test {
namespace {

using Kind = HeadPattern::Kind;

HeadPattern pattern(Kind kind, std::int64_t vertical, std::int64_t slash) {
  return {kind, vertical, slash, 0.0};
}

std::vector<HeadPattern> same_patterns(int heads, std::int64_t vertical, std::int64_t slash) {
  return std::vector<HeadPattern>(heads, pattern(Kind::kVerticalSlash, vertical, slash));
}

struct Case {
  Shape shape;
  std::vector<HeadPattern> patterns;
};

int failures = 0;

// Which sets have to be the same; of the others a few entries may differ.
enum class Exact { kNone, kColumns, kOffsets };

void check_case(const Case& c, const Fill& values, Exact exact) {
  const Fill fill = [&](bool is_key, int b, int t, int h, int d) {
    const auto& lens = is_key ? c.shape.kv_lens : c.shape.q_lens;
    if (!lens.empty() && t >= lens[b]) return NAN;
    return values(is_key, b, t, h, d);
  };
  const Inputs inputs(c.shape, fill);
  const SparseIndex expected = build_from_patterns(
      inputs.input, inputs.params, [&](std::int64_t h) { return c.patterns[h]; }, {}, 1);
  const std::int64_t bytes = cuda::pattern_index_bytes(inputs.problem, c.patterns);
  const DeviceArray<char> memory(bytes);
  REQUIRE_CUDA(cudaMemset(memory.get(), 0xFF, bytes));
  bool same = true;
  const SparseIndex got = build_three_times(
      inputs.problem, (c.shape.q_tokens + kRowBlock - 1) / kRowBlock,
      [&](cudaStream_t stream) {
        return cuda::build_pattern_index(inputs.problem, c.patterns, {memory.get(), bytes}, stream);
      },
      same);
  std::string error;
  try {
    validate(got, c.shape.batch, c.shape.q_heads, c.shape.q_tokens, c.shape.kv_tokens);
  } catch (const std::exception& e) {
    error = e.what();
  }
  const Agreement a = compare(expected, got);
  // Ties in what an exact case is not about depend on rounding.
  const auto is_enough = [&](double share, Exact which) {
    return exact == Exact::kNone ? share >= 0.995 : exact != which || share == 1.0;
  };
  const bool ok = error.empty() && same && a.kinds_differ == 0 &&
                  is_enough(a.columns, Exact::kColumns) && is_enough(a.offsets, Exact::kOffsets) &&
                  a.blocks >= 0.995;
  if (!ok) ++failures;
  std::printf(
      "%-4s %-34s sparse %d/%zu dense earlier %d kinds differ %d columns %.4f offsets %.4f blocks "
      "%.4f%s %s\n",
      ok ? "ok" : "FAIL", c.shape.name.c_str(), a.sparse, got.heads.size(), a.dense_earlier,
      a.kinds_differ, a.columns, a.offsets, a.blocks, same ? "" : " NOT THE SAME EVERY TIME",
      error.c_str());
}

// Only heavy keys: as many as the budget holds beside the forced ones, in every head others.
void check_exact_columns(int kv_tokens, int dim, DType dtype) {
  Shape shape{.name = "exact columns " + std::to_string(kv_tokens),
              .q_tokens = 300,
              .kv_tokens = kv_tokens,
              .q_heads = 4,
              .kv_heads = 2,
              .dim = dim,
              .dtype = dtype,
              .scale = 1};
  const auto heavy = [=](int t, int h) {
    return t >= 30 && t < kv_tokens - 64 && t * 7919 % kv_tokens / 2 % 97 == h;
  };
  Case c{shape, {}};
  for (int h = 0; h < 4; ++h) {
    std::int64_t count = 30;
    for (int t = 0; t < kv_tokens; ++t) count += heavy(t, h / 2) ? 1 : 0;
    c.patterns.push_back(pattern(Kind::kVerticalSlash, count, 500));
  }
  check_case(
      c,
      [&](bool is_key, int, int t, int h, int d) {
        if (d != 3) return 0.0F;
        return is_key ? (heavy(t, h) ? 8.0F : static_cast<float>(t % 4)) : 1.0F;
      },
      Exact::kColumns);
}

// Only heavy offsets, every 256th; the budget holds them all.
void check_exact_offsets(int kv_tokens, DType dtype) {
  constexpr int kPeriod = 256;
  constexpr int kPhase = 137;
  Shape shape{.name = "exact offsets " + std::to_string(kv_tokens),
              .q_tokens = 777,
              .kv_tokens = kv_tokens,
              .q_heads = 2,
              .kv_heads = 1,
              .dim = kPeriod,
              .dtype = dtype,
              .scale = 1};
  std::int64_t count = 100;
  for (int o = 100; o < kv_tokens; ++o) count += o % kPeriod == kPhase ? 1 : 0;
  Case c{shape, std::vector<HeadPattern>(2, pattern(Kind::kVerticalSlash, 100, count))};
  const int first = kv_tokens - shape.q_tokens;
  check_case(
      c,
      [=](bool is_key, int, int t, int, int d) {
        if (is_key) return t % kPeriod == d ? 4.0F : 0.0F;
        return (first + t - kPhase) % kPeriod == d ? 4.0F : 0.0F;
      },
      Exact::kOffsets);
}

void check_all() {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    check_exact_columns(5000, 64, dtype);
    check_exact_columns(2113, 40, dtype);
    check_exact_columns(3000, 200, dtype);
    check_exact_offsets(9001, dtype);
    check_exact_offsets(4096, dtype);
  }
  std::vector<Case> cases;
  const auto add = [&](const Shape& shape, std::int64_t vertical, std::int64_t slash) {
    cases.push_back({shape, same_patterns(shape.q_heads, vertical, slash)});
  };
  add({.name = "mha 64", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 3, .kv_heads = 3}, 100,
      200);
  add({.name = "gqa 4",
       .q_tokens = 9000,
       .kv_tokens = 9000,
       .q_heads = 8,
       .kv_heads = 2,
       .dim = 128},
      500, 700);
  add({.name = "gqa 8",
       .q_tokens = 500,
       .kv_tokens = 7000,
       .q_heads = 16,
       .kv_heads = 2,
       .dim = 96},
      300, 300);
  add({.name = "gqa 7 f16",
       .q_tokens = 512,
       .kv_tokens = 6000,
       .q_heads = 14,
       .kv_heads = 2,
       .dtype = DType::kF16},
      300, 300);
  add({.name = "dim 256",
       .q_tokens = 100,
       .kv_tokens = 5000,
       .q_heads = 4,
       .kv_heads = 1,
       .dim = 256},
      300, 300);
  add({.name = "dim 8", .q_tokens = 100, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 1, .dim = 8},
      300, 300);
  add({.name = "f32",
       .q_tokens = 2000,
       .kv_tokens = 3000,
       .q_heads = 4,
       .kv_heads = 2,
       .dtype = DType::kF32},
      100, 200);
  add({.name = "few rows", .q_tokens = 17, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2}, 100,
      200);
  add({.name = "one row", .q_tokens = 1, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2}, 100, 200);
  add({.name = "short", .q_tokens = 40, .kv_tokens = 40, .q_heads = 2, .kv_heads = 2}, 0, 0);
  add({.name = "just sparse", .q_tokens = 130, .kv_tokens = 130, .q_heads = 2, .kv_heads = 2}, 0,
      0);
  add({.name = "large budgets", .q_tokens = 900, .kv_tokens = 900, .q_heads = 2, .kv_heads = 2},
      1000, 6096);
  add({.name = "dense where cheaper",
       .q_tokens = 2000,
       .kv_tokens = 2000,
       .q_heads = 2,
       .kv_heads = 2},
      500, 1500);
  add(ragged_shape(), 100, 200);
  add({.name = "window",
       .q_tokens = 600,
       .kv_tokens = 4000,
       .q_heads = 2,
       .kv_heads = 1,
       .window = 900},
      100, 200);
  add({.name = "soft cap",
       .q_tokens = 600,
       .kv_tokens = 4000,
       .q_heads = 2,
       .kv_heads = 1,
       .soft_cap = 20,
       .scale = 0.3F},
      100, 200);
  add({.name = "not causal",
       .q_tokens = 600,
       .kv_tokens = 4000,
       .q_heads = 2,
       .kv_heads = 1,
       .causal = false},
      100, 200);
  add({.name = "more rows than keys",
       .q_tokens = 900,
       .kv_tokens = 600,
       .q_heads = 2,
       .kv_heads = 1},
      40, 110);
  for (const Shape& shape : storage_shapes(600, 4000)) add(shape, 100, 200);
  Case mixed{{.name = "mixed kinds",
              .q_tokens = 3000,
              .kv_tokens = 3000,
              .q_heads = 8,
              .kv_heads = 2,
              .dim = 128},
             {}};
  mixed.patterns = {
      pattern(Kind::kVerticalSlash, 100, 750), pattern(Kind::kAShape, 100, 500),
      pattern(Kind::kVerticalSlash, 30, 800),  pattern(Kind::kAShape, 0, 300),
      pattern(Kind::kAShape, 10, 0),           pattern(Kind::kAShape, 2000, 1500),
      pattern(Kind::kVerticalSlash, 0, 0),     pattern(Kind::kVerticalSlash, 9, 5000)};
  cases.push_back(mixed);
  mixed.shape.name = "with block_sparse";
  mixed.shape.batch = 2;
  mixed.shape.q_tokens = mixed.shape.kv_tokens = 9000;
  mixed.patterns[2].kind = Kind::kBlockSparse;
  mixed.patterns[5].kind = Kind::kBlockSparse;
  cases.push_back(mixed);
  add({.name = "128k",
       .q_tokens = 2048,
       .kv_tokens = 131072,
       .q_heads = 8,
       .kv_heads = 2,
       .dim = 128},
      1000, 6096);
  for (const Case& c : cases) check_case(c, random_fill(7, c.shape.dim), Exact::kNone);
}

void time_tokens(int tokens, bool heads_first) {
  const Shape shape{.name = std::to_string(tokens) + (heads_first ? ", heads first" : ""),
                    .q_tokens = 256,
                    .kv_tokens = tokens,
                    .q_heads = 32,
                    .kv_heads = 8,
                    .dim = 128,
                    .heads_first = heads_first};
  const Inputs inputs(shape, random_fill(7, shape.dim));
  const auto patterns = same_patterns(32, 1000, 6096);
  const std::int64_t bytes = cuda::pattern_index_bytes(inputs.problem, patterns);
  const DeviceArray<char> memory(bytes);
  print_times(
      "vertical_slash " + shape.name + ", workspace MB " + std::to_string(bytes >> 20),
      [&](cudaStream_t stream) {
        return cuda::build_pattern_index(inputs.problem, patterns, {memory.get(), bytes}, stream);
      });
}

void time_all() {
  for (const int tokens : {8192, 32768, 131072, 524288}) time_tokens(tokens, false);
  time_tokens(131072, true);
}

}  // namespace
}  // namespace minference::cuda_test

int main(int argc, char** argv) {
  using namespace minference::cuda_test;  // NOLINT(google-build-using-namespace)
  return run_index_test(argc, argv, failures, check_all, time_all);
}
