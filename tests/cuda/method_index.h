// A method's index on the device against that of the CPU, by the method's own recipe.
#pragma once

#include <span>

#include "index_support.h"
#include "minference/error.h"
#include "minference/index_recipe.h"
#include "minference/method.h"

namespace minference::cuda_test {

// What follows a recipe on one problem.
struct RecipeBuild {
  std::int64_t bytes = 0;
  std::function<cuda::DeviceIndex(const cuda::IndexWorkspace&, cudaStream_t)> build;
};

inline RecipeBuild follow(const cuda::Problem& problem, const IndexRecipe& recipe) {
  switch (recipe.kind) {
    case IndexRecipe::Kind::kPatterns:
      return {cuda::pattern_index_bytes(problem, recipe.patterns),
              [&problem, recipe](const cuda::IndexWorkspace& memory, cudaStream_t stream) {
                return cuda::build_pattern_index(problem, recipe.patterns, memory, stream);
              }};
    case IndexRecipe::Kind::kBlockSparse:
      return {cuda::block_sparse_index_bytes(problem, recipe.top_k),
              [&problem, recipe](const cuda::IndexWorkspace& memory, cudaStream_t stream) {
                return cuda::build_block_sparse_index(problem, recipe.top_k, memory, stream);
              }};
    case IndexRecipe::Kind::kAntidiagonal:
      return {cuda::antidiagonal_index_bytes(problem, recipe.antidiagonal),
              [&problem, recipe](const cuda::IndexWorkspace& memory, cudaStream_t stream) {
                return cuda::build_antidiagonal_index(problem, recipe.antidiagonal, memory, stream);
              }};
    case IndexRecipe::Kind::kFlexPrefill:
      return {cuda::flexprefill_index_bytes(problem, recipe.flexprefill),
              [&problem, recipe](const cuda::IndexWorkspace& memory, cudaStream_t stream) {
                return cuda::build_flexprefill_index(problem, recipe.flexprefill, memory, stream);
              }};
    case IndexRecipe::Kind::kModalities:
      return {cuda::modality_index_bytes(problem, recipe.modality, recipe.sequences),
              [&problem, recipe](const cuda::IndexWorkspace& memory, cudaStream_t stream) {
                return cuda::build_modality_index(problem, recipe.modality, recipe.sequences,
                                                  memory, stream);
              }};
  }
  throw Error("an index recipe of an unknown kind");
}

// One list a sequence, or none.
using SegmentLists = std::vector<std::vector<Segment>>;

// Compares and prints a line; false unless the indices are equal (`exact`) or overlap by 99.5 %.
inline bool check_index(const char* name, const MethodOptions& given, const Shape& shape,
                        const Fill& values, bool exact, const SegmentLists& segments = {}) {
  const Fill fill = [&](bool is_key, int b, int t, int h, int d) {
    const auto& lens = is_key ? shape.kv_lens : shape.q_lens;
    if (!lens.empty() && t >= lens[b]) return NAN;
    return values(is_key, b, t, h, d);
  };
  const Inputs inputs(shape, fill);
  const Method& method = find_method(name);
  const MethodOptions options = resolve_options(method, given);
  const std::vector<std::span<const Segment>> spans(segments.begin(), segments.end());
  MethodContext context;
  context.segments = spans;
  const SparseIndex expected = method.build_index(inputs.input, inputs.params, options, context);
  const RecipeBuild recipe =
      follow(inputs.problem, *method.recipe(inputs.input, inputs.params, options, context));
  const DeviceArray<char> memory(recipe.bytes);
  REQUIRE_CUDA(cudaMemset(memory.get(), 0xFF, recipe.bytes));
  bool same = true;
  const SparseIndex got = build_three_times(
      inputs.problem, (shape.q_tokens + kRowBlock - 1) / kRowBlock,
      [&](cudaStream_t stream) {
        return recipe.build({memory.get(), recipe.bytes}, stream);
      },
      same);
  std::string error;
  try {
    validate(got, shape.batch, shape.q_heads, shape.q_tokens, shape.kv_tokens);
  } catch (const std::exception& e) {
    error = e.what();
  }
  const Agreement a = compare(expected, got);
  std::int64_t kept = 0;
  for (const HeadIndex& head : expected.heads) {
    kept += std::ssize(head.block_ids) + std::ssize(head.columns);
  }
  const double least = std::min({a.columns, a.offsets, a.blocks});
  const bool ok = error.empty() && same && a.kinds_differ == 0 && least >= (exact ? 1.0 : 0.995);
  std::printf(
      "%-4s %-12s %-22s sparse %d/%zu, dense earlier %d, %lld kept, kinds differ %d, columns %.5f "
      "offsets %.5f blocks %.5f%s %s\n",
      ok ? "ok" : "FAIL", name, shape.name.c_str(), a.sparse, got.heads.size(), a.dense_earlier,
      static_cast<long long>(kept), a.kinds_differ, a.columns, a.offsets, a.blocks,
      same ? "" : " NOT THE SAME EVERY TIME", error.c_str());
  return ok;
}

// Prints how long a method's index takes on 32/8 heads of 128.
inline void time_index(const char* name, int tokens, const MethodOptions& given = {},
                       const SegmentLists& segments = {}) {
  const Shape shape{.name = std::to_string(tokens),
                    .q_tokens = tokens,
                    .kv_tokens = tokens,
                    .q_heads = 32,
                    .kv_heads = 8,
                    .dim = 128};
  const Inputs inputs(shape, [](bool is_key, int b, int t, int h, int d) {
    return 4 * hashed(is_key ? 1 : 0, b, t, h, d) - 2;
  });
  const Method& method = find_method(name);
  const std::vector<std::span<const Segment>> spans(segments.begin(), segments.end());
  MethodContext context;
  context.segments = spans;
  const RecipeBuild recipe =
      follow(inputs.problem,
             *method.recipe(inputs.input, inputs.params, resolve_options(method, given), context));
  const DeviceArray<char> memory(recipe.bytes);
  print_times(name + (" " + shape.name) + ", workspace MB " + std::to_string(recipe.bytes >> 20),
              [&](cudaStream_t stream) {
                return recipe.build({memory.get(), recipe.bytes}, stream);
              });
}

}  // namespace minference::cuda_test
