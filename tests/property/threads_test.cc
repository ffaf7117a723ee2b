// Calls from wherever a host may make them: parallel regions, many threads, forked children.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention/cpu/executor.h"
#include "core/parallel.h"
#include "minference/linear.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// Attention and a product, with the results of a call on one thread, which are those of any other.
class Job {
 public:
  Job(IsaLevel level, std::uint64_t seed) : level_(level) {
    Case c;
    c.seed = seed;
    c.q_heads = c.kv_heads = 6;
    c.q_len = 130 + static_cast<std::int64_t>(seed) * 11;
    c.pattern = seed % 2 == 0 ? Pattern::kNone : Pattern::kMixed;
    problem_ = make_problem(c);
    for (std::int64_t i = 0; i < kTokens * kSize; ++i) {
      a_.push_back(static_cast<float>(static_cast<std::int64_t>(seed) + i % 13 - 6));
    }
    expected_ = run(1);
  }

  bool right(int threads) const { return first_difference(run(threads), expected_) == -1; }

 private:
  static constexpr std::int64_t kTokens = 70;
  static constexpr std::int64_t kSize = 65;

  static void unpack(const void*, std::int64_t row, std::int64_t begin, std::int64_t count,
                     float* out) {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<float>((row * 5 + begin + i) % 11 - 5);
    }
  }

  std::vector<float> run(int threads) const {
    AttentionParams params = problem_.params;
    params.threads = threads;
    const Result result = make_result(problem_.input(), DType::kF32, Layout::kPacked);
    attention_cpu(problem_.input(), params, result.output(), problem_.index(), level_);
    std::vector<float> values = result.out.values();
    std::vector<float> product(kTokens * kSize);
    linear_cpu(a_.data(), kSize, kTokens, {kSize, kSize, unpack, nullptr}, product.data(), kSize,
               level_, threads);
    values.insert(values.end(), product.begin(), product.end());
    return values;
  }

  IsaLevel level_;
  Problem problem_;
  std::vector<float> a_;
  std::vector<float> expected_;
};

std::vector<Job> make_jobs(IsaLevel level, std::uint64_t count) {
  std::vector<Job> jobs;
  for (std::uint64_t seed = 1; seed <= count; ++seed) jobs.emplace_back(level, seed);
  return jobs;
}

void expect_right_at_once(std::uint64_t callers, int threads) {
  for (const IsaLevel level : available_isa_levels()) {
    const std::vector<Job> jobs = make_jobs(level, callers);
    std::atomic<int> wrong{0};
    std::vector<std::thread> pool;
    pool.reserve(jobs.size());
    for (const Job& job : jobs) {
      pool.emplace_back([&] {
        for (int repeat = 0; repeat < 3; ++repeat) wrong += job.right(threads) ? 0 : 1;
      });
    }
    for (std::thread& thread : pool) thread.join();
    EXPECT_EQ(wrong, 0) << isa_name(level) << ", " << callers << " callers of " << threads
                        << " threads";
  }
}

TEST(Callers, TwoAtOnce) {
  expect_right_at_once(2, 1);
  expect_right_at_once(2, 2);
}

TEST(Callers, EightAtOnce) { expect_right_at_once(8, 1); }

TEST(Callers, EightAtOnceWithFourThreadsEach) { expect_right_at_once(8, 4); }

#ifdef _OPENMP
TEST(Callers, ParallelRegion) {
  const int levels = omp_get_max_active_levels();
  for (const int active_levels : {1, 2}) {  // 2: the calls open regions of their own
    omp_set_max_active_levels(active_levels);
    for (const IsaLevel level : available_isa_levels()) {
      const std::vector<Job> jobs = make_jobs(level, 4);
      std::atomic<int> wrong{0};
#pragma omp parallel for num_threads(4) schedule(static, 1)
      for (int i = 0; i < 4; ++i) wrong += jobs[i].right(3) ? 0 : 1;
      EXPECT_EQ(wrong, 0) << isa_name(level) << ", " << active_levels << " active levels";
    }
  }
  omp_set_max_active_levels(levels);
}
#endif

// Runs `check` in a forked child, which a lock-up ends after a while; true when it returned true.
template <class Check>
bool true_in_child(Check&& check) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(check() ? 0 : 1);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// qemu loses count of its processors when a forked child of a process with several threads starts one
// (its own assertion fails, now and then), whoever starts the thread.
#ifdef MINFERENCE_TEST_EMULATED
constexpr bool kChildCanStartThreads = false;
#else
constexpr bool kChildCanStartThreads = true;
#endif

TEST(ForkedChild, IsTold) {
  EXPECT_FALSE(in_forked_child());
  EXPECT_TRUE(true_in_child([] { return in_forked_child(); }));
  EXPECT_FALSE(in_forked_child());
}

TEST(ForkedChild, ComputesOnOneThread) {
  for (const IsaLevel level : available_isa_levels()) {
    const Job job(level, 1);
    ASSERT_TRUE(job.right(3));
    EXPECT_TRUE(true_in_child([&] { return job.right(1); })) << isa_name(level);
    EXPECT_TRUE(job.right(3)) << isa_name(level) << ", the parent";
  }
}

// GCC's OpenMP runtime waits for ever in a child whose parent had run a parallel region.
TEST(ForkedChild, ComputesOnSeveralThreads) {
  if (!kChildCanStartThreads)
    GTEST_SKIP() << "under an emulator a forked child cannot start threads";
  for (const IsaLevel level : available_isa_levels()) {
    const std::vector<Job> jobs = make_jobs(level, 2);
    for (const Job& job : jobs) ASSERT_TRUE(job.right(3));
    for (const int threads : {2, 5, 0}) {
      ASSERT_TRUE(true_in_child([&] { return jobs[0].right(threads) && jobs[1].right(threads); }))
          << isa_name(level) << ", " << threads << " threads";
    }
    EXPECT_TRUE(true_in_child([&] { return true_in_child([&] { return jobs[0].right(2); }); }))
        << isa_name(level) << ", a child's child";
    for (const Job& job : jobs) EXPECT_TRUE(job.right(3)) << isa_name(level) << ", the parent";
  }
}

TEST(ForkedChild, VisitsEveryIndexAndCarriesExceptions) {
  if (!kChildCanStartThreads)
    GTEST_SKIP() << "under an emulator a forked child cannot start threads";
  EXPECT_TRUE(true_in_child([] {
    std::vector<std::atomic<int>> visits(1000);
    parallel_for(1000, 4, [&](std::int64_t i, int thread) {
      visits[i] += thread >= 0 && thread < 4 ? 1 : 100;
    });
    try {
      parallel_for(1000, 4, [](std::int64_t i, int) {
        if (i == 3) throw std::runtime_error("third");
      });
      return false;
    } catch (const std::runtime_error&) {
    }
    return std::all_of(visits.begin(), visits.end(), [](const auto& n) { return n == 1; });
  }));
}

// A thread that leaves its tiles configured pays for them at every switch, and cannot sleep deeply.
TEST(Amx, CallsReleaseTheTiles) {
  const std::vector<IsaLevel> levels = available_isa_levels();
  if (std::find(levels.begin(), levels.end(), IsaLevel::kAmxBf16) == levels.end()) {
    GTEST_SKIP() << "this machine or build has no level amx_bf16";
  }
#ifdef __x86_64__
  const auto released = [] {
    alignas(64) std::uint8_t config[64];
    std::memset(config, 0xFF, sizeof(config));
    asm volatile("sttilecfg %0" : "=m"(config));
    return std::all_of(std::begin(config), std::end(config), [](auto byte) { return byte == 0; });
  };
  ASSERT_TRUE(released());
  for (const Job& job : make_jobs(IsaLevel::kAmxBf16, 2)) {
    for (const int threads : {1, 4}) {
      EXPECT_TRUE(job.right(threads));
      EXPECT_TRUE(released()) << "the caller's thread, of " << threads;
      std::atomic<int> configured{0};
      parallel_for(64, threads, [&](std::int64_t, int) { configured += released() ? 0 : 1; });
      EXPECT_EQ(configured, 0) << "worker threads, of " << threads;
    }
  }
#endif
}

}  // namespace
}  // namespace minference::test
