// Text on its way into an HTML page.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace minference::explain {

// For element content and quoted attributes.
std::string html_escape(std::string_view text);

// "data:image/png;base64,..." of the bytes of a PNG file.
std::string png_data_uri(std::string_view png);

// `page` with every "@key@" of `values` replaced; what is inserted is not looked at again, and other
// text between two @ stays.
std::string fill_template(std::string_view page, const std::map<std::string, std::string>& values);

}  // namespace minference::explain
