#include "cli/png.h"

#include <algorithm>
#include <vector>

#include <png.h>

#include "minference/error.h"

namespace minference::cli {

std::string encode_png(const explain::Picture& picture) {
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
  for (const explain::Colour& colour : picture.palette) {
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
