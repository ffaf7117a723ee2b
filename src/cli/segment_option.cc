#include "cli/segment_option.h"

#include <charconv>
#include <string_view>

#include "llama/plugin_config.h"
#include "minference/error.h"

namespace minference::cli {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw InvalidArgument("'" + text +
                        "' is not a segment; expected begin:end:text or begin:end:visual[:stride], "
                        "whole numbers of tokens, for example 128:8320:visual:256");
}

// The number in a field of `text`.
std::int64_t parse_number(std::string_view field, const std::string& text) {
  std::int64_t value = 0;
  const char* end = field.data() + field.size();
  const auto [stop, error] = std::from_chars(field.data(), end, value);
  if (error != std::errc() || stop != end) refuse(text);
  return value;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> fields;
  for (std::size_t colon = text.find(':'); colon != std::string_view::npos;
       colon = text.find(':')) {
    fields.push_back(text.substr(0, colon));
    text.remove_prefix(colon + 1);
  }
  fields.push_back(text);
  return fields;
}

}  // namespace

CLI::Option* add_segment_option(CLI::App& command, std::vector<std::string>& texts) {
  return command
      .add_option(
          "--segments", texts,
          "Visual tokens of the prompt, as begin:end:visual[:tokens of a frame], the first\n"
          "token being 0; several are separated by commas. For the method " +
              llama_host::segment_method_names())
      ->delimiter(',')
      ->allow_extra_args(false);
}

std::vector<Segment> parse_segments(const std::vector<std::string>& texts) {
  std::vector<Segment> segments;
  for (const std::string& text : texts) {
    const std::vector<std::string_view> fields = split(text);
    if (fields.size() != 3 && fields.size() != 4) refuse(text);
    Segment segment;
    segment.begin = parse_number(fields[0], text);
    segment.end = parse_number(fields[1], text);
    if (fields[2] == "visual") {
      segment.modality = Modality::kVisual;
    } else if (fields[2] != "text") {
      refuse(text);
    }
    if (fields.size() == 4) segment.stride = parse_number(fields[3], text);
    segments.push_back(segment);
  }
  return segments;
}

}  // namespace minference::cli
