// What libminference_cuda.so offers to the rest of the library, which never links it.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/cuda.h"
#include "minference/index_recipe.h"

namespace minference::cuda {

// Why a function of the library failed: nothing is thrown across its boundary.
struct Failure {
  enum class Kind : std::uint8_t { kNone, kInvalidArgument, kUnsupported, kError };
  Kind kind = Kind::kNone;
  std::string message;
};

struct Library {
  // Compared with that of the caller: both must be of one build.
  const char* version;
  void (*devices)(std::vector<CudaDevice>& devices, Failure& failure);
  // attention() over validated arguments.
  void (*attention)(const AttentionInput& input, const AttentionParams& params,
                    const AttentionOutput& output, const SparseIndex* index, Stats& stats,
                    Failure& failure);
  // The same over the index of a recipe, found on the device.
  void (*attention_by_recipe)(const AttentionInput& input, const AttentionParams& params,
                              const AttentionOutput& output, const IndexRecipe& recipe,
                              Stats& stats, Failure& failure);
};

// The one symbol that the library exports.
extern "C" const Library* minference_cuda_library();

}  // namespace minference::cuda

namespace minference {

// attention() for tensors on a CUDA device, validated.
Stats attention_cuda(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const SparseIndex* index);
Stats attention_cuda(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const IndexRecipe& recipe);

}  // namespace minference
