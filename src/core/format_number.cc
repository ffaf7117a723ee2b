#include "core/format_number.h"

#include <charconv>
#include <cmath>
#include <cstdint>

namespace minference {

std::string format_number(double value) {
  constexpr double kAllDigits =
      1e15;  // below, whole numbers are exact, and clearer without exponent
  if (std::abs(value) < kAllDigits && value == std::trunc(value)) {
    return std::to_string(static_cast<std::int64_t>(value));
  }
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return {text, end};
}

}  // namespace minference
