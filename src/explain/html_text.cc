#include "explain/html_text.h"

#include <cstdint>

namespace minference::explain {

std::string html_escape(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string png_data_uri(std::string_view png) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string uri = "data:image/png;base64,";
  uri.reserve(uri.size() + (png.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < png.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      group = group << 8 | (i + j < png.size() ? static_cast<unsigned char>(png[i + j]) : 0U);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      uri += i + j <= png.size() ? kDigits[group >> (18 - 6 * j) & 0x3FU] : '=';
    }
  }
  return uri;
}

std::string fill_template(std::string_view page, const std::map<std::string, std::string>& values) {
  std::string result;
  while (!page.empty()) {
    const std::size_t begin = page.find('@');
    result += page.substr(0, begin);
    if (begin == std::string_view::npos) break;
    const std::size_t end = page.find('@', begin + 1);
    const auto value = end == std::string_view::npos
                           ? values.end()
                           : values.find(std::string(page.substr(begin + 1, end - begin - 1)));
    if (value == values.end()) {
      result += '@';
      page.remove_prefix(begin + 1);
    } else {
      result += value->second;
      page.remove_prefix(end + 1);
    }
  }
  return result;
}

}  // namespace minference::explain
