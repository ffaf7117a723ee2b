// The methods' factory functions: the one list to extend when a method is added.
#pragma once

#include "minference/method.h"

namespace minference {

const Method& dense_method();
const Method& a_shape_method();
const Method& vertical_slash_method();
const Method& minference_method();

}  // namespace minference
