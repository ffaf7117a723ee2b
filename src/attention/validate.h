// The parts of validate() that others need too: estimators, the guard, the Python package.
#pragma once

#include <cstdint>

#include "minference/attention.h"

namespace minference {

// Keys that a sequence can have at most: kv_tokens, or the capacity of its pages.
std::int64_t key_capacity(const AttentionInput& input);

// Throws InvalidArgument unless the two obey the contract of attention().
void validate_input(const AttentionInput& input, const AttentionParams& params);

// Throws InvalidArgument, naming the argument `name`, unless `device` is q's.
void validate_device(const char* name, Device device, Device q);

}  // namespace minference
