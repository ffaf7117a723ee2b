// Pictures of reports: colour maps, and pictures of few colours.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace minference::explain {

struct Colour {
  std::uint8_t red = 0;
  std::uint8_t green = 0;
  std::uint8_t blue = 0;

  bool operator==(const Colour&) const = default;
};

// "#rrggbb".
std::string css(const Colour& colour);

// A scale of colours for values from 0 to 1: the given stops at equal distances, linear between.
class ColourMap {
 public:
  ColourMap(std::initializer_list<Colour> stops) : stops_(stops) {}

  // Values outside of 0 to 1, and NaN, have the colour of the nearer end, respectively of 0.
  Colour at(double value) const;
  // The stops as a CSS gradient from left to right.
  std::string css_gradient() const;

 private:
  std::vector<Colour> stops_;
};

// Where `value` lies between `low` (0) and `high` (1) on a logarithmic scale; 0 < low < high.
double log_position(double value, double low, double high);

// Pixels that are indices into a palette of at most 256 colours.
struct Picture {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::vector<Colour> palette;
  std::vector<std::uint8_t> pixels;  // [height][width]
};

// Every pixel as a square of `factor` pixels.
Picture enlarge(const Picture& picture, std::int64_t factor);

// The bytes of a PNG file. Each host has its own library for them.
using PngEncoder = std::function<std::string(const Picture&)>;

}  // namespace minference::explain
