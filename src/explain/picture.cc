#include "explain/picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace minference::explain {

std::string css(const Colour& colour) {
  char text[8];
  std::snprintf(text, sizeof(text), "#%02x%02x%02x", colour.red, colour.green, colour.blue);
  return text;
}

Colour ColourMap::at(double value) const {
  const double scaled = std::isnan(value)
                            ? 0.0
                            : std::clamp(value, 0.0, 1.0) * static_cast<double>(stops_.size() - 1);
  const std::size_t left =
      std::min(static_cast<std::size_t>(scaled), std::max<std::size_t>(stops_.size(), 2) - 2);
  const std::size_t right = std::min(left + 1, stops_.size() - 1);
  const double weight = scaled - static_cast<double>(left);
  const auto mix = [weight](std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(std::lround(a + weight * (b - a)));
  };
  const Colour& a = stops_[left];
  const Colour& b = stops_[right];
  return {mix(a.red, b.red), mix(a.green, b.green), mix(a.blue, b.blue)};
}

std::string ColourMap::css_gradient() const {
  std::string text = "linear-gradient(to right";
  for (const Colour& stop : stops_) text += ", " + css(stop);
  return text + ")";
}

double log_position(double value, double low, double high) {
  if (!(value > low)) return 0.0;
  if (value >= high) return 1.0;
  return std::log(value / low) / std::log(high / low);
}

Picture enlarge(const Picture& picture, std::int64_t factor) {
  Picture result{picture.width * factor, picture.height * factor, picture.palette, {}};
  result.pixels.resize(static_cast<std::size_t>(result.width * result.height));
  for (std::int64_t y = 0; y < result.height; ++y) {
    for (std::int64_t x = 0; x < result.width; ++x) {
      result.pixels[y * result.width + x] = picture.pixels[y / factor * picture.width + x / factor];
    }
  }
  return result;
}

}  // namespace minference::explain
