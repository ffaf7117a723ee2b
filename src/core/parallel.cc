#include "core/parallel.h"

#include <pthread.h>

namespace minference {
namespace {

std::atomic<bool> forked{false};

// Registered when the library is loaded, because the first parallel region of the parent may be the
// host's, long before the first call of this library.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace minference
