#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace minference {
namespace {

TEST(ParallelFor, VisitsEveryIndexOnce) {
  for (const int threads : {0, 1, 2, 7}) {
    for (const std::int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> visits(count);
      parallel_for(count, threads, [&](std::int64_t i, int thread) {
        visits[i] += 1;
        EXPECT_GE(thread, 0);
        EXPECT_LT(thread, resolve_threads(threads));
      });
      for (const auto& visit : visits) EXPECT_EQ(visit, 1);
    }
  }
}

TEST(ParallelFor, NegativeCountsAreEmpty) {
  parallel_for(-5, 2, [](std::int64_t, int) { FAIL(); });
}

TEST(ParallelFor, RethrowsAnExceptionAndStops) {
  for (const int threads : {1, 4}) {
    std::atomic<std::int64_t> visited{0};
    try {
      parallel_for(1'000'000, threads, [&](std::int64_t i, int) {
        visited += 1;
        if (i == 3) throw std::runtime_error("third");
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "third");
    }
    EXPECT_LT(visited, 1'000'000);
  }
}

TEST(ParallelFor, ResolvesThreads) {
  EXPECT_EQ(resolve_threads(3), 3);
  EXPECT_GE(resolve_threads(0), 1);
  EXPECT_GE(resolve_threads(-1), 1);
}

}  // namespace
}  // namespace minference
