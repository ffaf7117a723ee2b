// MethodState as Python holds it: with a lock, because Python objects are shared more easily.
#pragma once

#include <atomic>

#include "minference/method.h"

namespace minference::python {

struct SharedMethodState {
  MethodState state;
  std::atomic<bool> in_use = false;
};

// Takes a state for one call. Throws InvalidArgument when another call has it. null: nothing.
class StateLock {
 public:
  explicit StateLock(SharedMethodState* shared);
  ~StateLock();
  StateLock(const StateLock&) = delete;
  StateLock& operator=(const StateLock&) = delete;

  MethodState* get() const { return shared_ == nullptr ? nullptr : &shared_->state; }

 private:
  SharedMethodState* shared_;
};

}  // namespace minference::python
