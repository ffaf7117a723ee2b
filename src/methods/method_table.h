// The methods' factory functions, which attention_methods() in method.cc lists for users.
#pragma once

#include "minference/method.h"

namespace minference {

const Method& a_shape_method();
const Method& auto_method();
const Method& block_sparse_method();
const Method& dense_method();
const Method& dilated1_method();
const Method& dilated2_method();
const Method& flexprefill_method();
const Method& inf_llm_method();
const Method& minference_method();
const Method& mminference_method();
const Method& static_method();
const Method& tri_mix_method();
const Method& tri_mix_minference_method();
const Method& tri_shape_method();
const Method& vertical_slash_method();
const Method& xattention_method();

}  // namespace minference
