// The rule that decides whether a call may round its inputs to bf16.
#pragma once

#include "minference/attention.h"

namespace minference {

// True when bf16 products are acceptable: see Precision.
bool allows_bf16(const AttentionInput& input, const AttentionParams& params);

}  // namespace minference
