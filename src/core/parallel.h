// parallel_for: a dynamic loop over threads that carries exceptions out of the parallel region.
//
// OpenMP is used because ggml and torch use it too: sharing one runtime keeps two pools from
// spinning against each other on the same cores. Plain threads are started instead in builds
// without OpenMP (thread sanitizer, which does not know GCC's runtime) and in forked children,
// where GCC's runtime would wait for ever for the pool of threads that the parent had.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace minference {

// True in a process that was forked, without exec, from one that had this library loaded.
bool in_forked_child();

// Threads that a request for `threads` gives (0 or less: the runtime's default).
inline int resolve_threads(int threads) {
  if (threads > 0) return threads;
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

// Calls body(i, thread) for i in [0, count), started in ascending order, each on the next free of
// `threads` threads; `thread` is below resolve_threads(threads). The first exception ends the loop
// early and is rethrown here.
template <class Body>
void parallel_for(std::int64_t count, int threads, Body&& body) {
  if (count <= 0) return;
  threads = static_cast<int>(std::min<std::int64_t>(resolve_threads(threads), count));
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&](int thread) {
    try {
      for (;;) {
        const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) break;
        body(i, thread);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
      next.store(count, std::memory_order_relaxed);
    }
  };
#ifdef _OPENMP
  const bool plain_threads = in_forked_child();
#else
  const bool plain_threads = true;
#endif
  if (plain_threads) {
    std::vector<std::thread> pool;
    pool.reserve(threads);
    try {
      for (int t = 1; t < threads; ++t) pool.emplace_back(work, t);
    } catch (const std::exception&) {
      // The system gives no more threads; those that run do all of the work.
    }
    work(0);
    for (std::thread& thread : pool) thread.join();
  } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
#endif
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace minference
