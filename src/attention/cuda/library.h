// What libminference_cuda.so offers to the rest of the library, which never links it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "guard/row_sample.h"
#include "minference/attention.h"
#include "minference/cuda.h"
#include "minference/guard.h"
#include "minference/index_recipe.h"

namespace minference::cuda {

// Why a function of the library failed: nothing is thrown across its boundary.
struct Failure {
  enum class Kind : std::uint8_t { kNone, kInvalidArgument, kUnsupported, kError };
  Kind kind = Kind::kNone;
  std::string message;
};

// What attention goes over, everything where all is null, and the guard that looks at it first.
struct IndexSource {
  const SparseIndex* index = nullptr;
  const IndexRecipe* recipe = nullptr;  // found on the device
  GuardOptions guard;
};

// An index on a device, for any number of runs.
class DevicePlan {
 public:
  virtual ~DevicePlan() = default;
  // Attention over it, in the stream in which it was found; the sizes are those of the plan's input.
  virtual void execute(const AttentionInput& input, const AttentionParams& params,
                       const AttentionOutput& output, Stats& stats, Failure& failure) const = 0;
};

struct Library {
  // Compared with that of the caller: both must be of one build.
  const char* version;
  void (*devices)(std::vector<CudaDevice>& devices, Failure& failure);
  // attention() over validated arguments.
  void (*attention)(const AttentionInput& input, const AttentionParams& params,
                    const AttentionOutput& output, const IndexSource& source, Stats& stats,
                    Failure& failure);
  // Its first half: the index and the guard.
  std::unique_ptr<DevicePlan> (*plan)(const AttentionInput& input, const AttentionParams& params,
                                      const IndexSource& source, Stats& stats, Failure& failure);
  // mass_recall() over validated arguments, on the rows of `sample`.
  std::vector<double> (*mass_recall)(const AttentionInput& input, const AttentionParams& params,
                                     const SparseIndex& index, const RowSample& sample,
                                     Failure& failure);
};

// The one symbol that the library exports.
extern "C" const Library* minference_cuda_library();

}  // namespace minference::cuda

namespace minference {

// The functions of the library for tensors on a CUDA device, validated. They throw what it reports.
Stats attention_cuda(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const cuda::IndexSource& source);
std::unique_ptr<cuda::DevicePlan> plan_cuda(const AttentionInput& input,
                                            const AttentionParams& params,
                                            const cuda::IndexSource& source, Stats& stats);
Stats execute_cuda(const cuda::DevicePlan& plan, const AttentionInput& input,
                   const AttentionParams& params, const AttentionOutput& output);
std::vector<double> mass_recall_cuda(const AttentionInput& input, const AttentionParams& params,
                                     const SparseIndex& index, const RowSample& sample);

}  // namespace minference
