// Integer arithmetic that refuses to wrap: sizes come from callers, and callers get them wrong.
#pragma once

#include <cstdint>
#include <string>

#include "minference/error.h"

namespace minference {

// a * b. Throws InvalidArgument naming `what` and both factors when it does not fit.
inline std::int64_t checked_mul(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw InvalidArgument(std::string(what) + " overflows 64 bits: " + std::to_string(a) + " * " +
                          std::to_string(b));
  }
  return result;
}

// a + b. Throws InvalidArgument naming `what` and both terms when it does not fit.
inline std::int64_t checked_add(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    throw InvalidArgument(std::string(what) + " overflows 64 bits: " + std::to_string(a) + " + " +
                          std::to_string(b));
  }
  return result;
}

}  // namespace minference
