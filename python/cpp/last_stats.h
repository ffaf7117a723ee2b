// The Stats that minference.last_stats() returns.
#pragma once

#include "minference/attention.h"

namespace minference::python {

// Keeps them for the calling thread.
void set_last_stats(const Stats& stats);

}  // namespace minference::python
