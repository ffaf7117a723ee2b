// Checks that every index builder makes before it enqueues anything.
#pragma once

#include "attention/cuda/problem.h"
#include "index/cuda/build_index.h"

namespace minference::cuda {

// Throws InvalidArgument, naming value and legal range, for sizes that no kernel here takes;
// Unsupported for q and k of two types and for head dims that are no multiple of 8.
void check_problem(const Problem& problem);

// Throws InvalidArgument unless it is a multiple of kRowBlock up to 1024; unless it lies from 0 to 1.
void check_block_size(std::int64_t block_size);
void check_share(const char* what, double share);

// Throws InvalidArgument unless the workspace holds `needed` bytes at an aligned address.
void check_workspace(const IndexWorkspace& workspace, std::int64_t needed);

}  // namespace minference::cuda
