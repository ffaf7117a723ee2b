// PNG files, by libpng.
#pragma once

#include <string>

#include "explain/picture.h"

namespace minference::cli {

// The bytes of a PNG file. Throws InvalidArgument for a picture without pixels or colours, with more
// than 256 colours or 16 million pixels, or with a pixel that has no colour.
std::string encode_png(const explain::Picture& picture);

}  // namespace minference::cli
