#include "index/cuda/last_q.h"

#include "index/cuda/last_q_sums.cuh"
#include "index/cuda/row_pass.cuh"

namespace minference::cuda {
namespace {

using namespace last_q;    // NOLINT(google-build-using-namespace): this file is their front
using namespace row_pass;  // NOLINT(google-build-using-namespace)

struct LastQArguments : row_pass::Arguments {
  LastQSums sums;
  std::int64_t stride = 0;
};

// The second kernel: what a warp does with the scores of one head and its range of keys.
class SumsOfHead {
 public:
  using Rows = LastRows;
  static constexpr bool kNeedsKeys = true;

  __device__ SumsOfHead(const LastQArguments& a, const Task& task, Control<Rows>& control,
                        std::int64_t head, int local)
      : sums_(control.log_sums[local]), kv_len_(task.geometry.kv_len) {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    combine_partials<Rows>(a, task, a.partials + head * a.plan.chunks * kLastRows,
                           control.log_sums[local]);
    columns_ = a.sums.columns + head * a.stride + SlashSums::place();
    diagonals_ = a.sums.diagonals + head * a.stride + SlashSums::place();
    tails_ = a.sums.tails + ((head * a.plan.chunks + blockIdx.x) * kRanges + warp) * kLastRows;
  }

  __device__ void add(const float (&scores)[kScores], float factor, int first_key, int) {
    float column;
    float diagonal;
    sums_.add(scores, factor, column, diagonal);
    if (SlashSums::writes() && first_key + SlashSums::place() < kv_len_) {
      columns_[first_key] = column;
      diagonals_[first_key] = diagonal;
    }
  }

  __device__ void end() {
    for (int n = 0; n < kLastRows; n += kStepKeys) {
      const float diagonal = sums_.advance();
      if (SlashSums::writes()) tails_[n + SlashSums::place()] = diagonal;
    }
  }

 private:
  SlashSums sums_;
  int kv_len_;
  float* columns_;
  float* diagonals_;
  float* tails_;
};

}  // namespace

void estimate_last_q(const Problem& problem, const LastQPlan& plan, const std::uint8_t* wanted,
                     int first, int count, const LastQSums& sums, cudaStream_t stream) {
  LastQArguments arguments{arguments_of(problem, plan, wanted)};
  arguments.partials = sums.partials;
  arguments.first_unit = first;
  arguments.sums = sums;
  arguments.stride = plan.stride;
  row_pass::launch<StatsOfHead<LastRows>>(arguments, count, stream);
  row_pass::launch<SumsOfHead>(arguments, count, stream);
}

}  // namespace minference::cuda
