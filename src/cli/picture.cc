#include "cli/picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <png.h>

#include "minference/error.h"

namespace minference::cli {

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

std::string encode_png(const Picture& picture) {
  constexpr std::int64_t kMaxPixels = 1 << 24;
  constexpr std::int64_t kMaxColours = 256;
  const auto colours = static_cast<std::int64_t>(picture.palette.size());
  const auto pixels = static_cast<std::int64_t>(picture.pixels.size());
  if (picture.width < 1 || picture.height < 1 || picture.width > kMaxPixels ||
      picture.height > kMaxPixels / picture.width || pixels != picture.width * picture.height ||
      colours < 1 || colours > kMaxColours ||
      *std::max_element(picture.pixels.begin(), picture.pixels.end()) >= colours) {
    throw InvalidArgument("a picture of " + std::to_string(picture.width) + " x " +
                          std::to_string(picture.height) + " pixels in " + std::to_string(colours) +
                          " colours has " + std::to_string(pixels) + " values");
  }
  std::vector<std::uint8_t> palette;
  for (const Colour& colour : picture.palette) {
    palette.insert(palette.end(), {colour.red, colour.green, colour.blue});
  }
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(picture.width);
  image.height = static_cast<png_uint_32>(picture.height);
  image.format = PNG_FORMAT_RGB_COLORMAP;
  image.colormap_entries = static_cast<png_uint_32>(colours);
  std::string bytes(PNG_IMAGE_PNG_SIZE_MAX(image), '\0');
  png_alloc_size_t size = bytes.size();
  if (png_image_write_to_memory(&image, bytes.data(), &size, 0, picture.pixels.data(), 0,
                                palette.data()) == 0) {
    throw Unsupported(std::string("libpng cannot encode a picture: ") + image.message);
  }
  bytes.resize(size);
  return bytes;
}

}  // namespace minference::cli
