// The option --segments: which tokens of a prompt are visual.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "minference/segment.h"

namespace minference::cli {

// Adds it; `texts` is for parse_segments().
CLI::Option* add_segment_option(CLI::App& command, std::vector<std::string>& texts);

// Each text is begin:end:modality[:stride], for example 128:8320:visual:256. Throws InvalidArgument
// naming the text and what is legal; whether segments fit each other and the prompt is not checked.
std::vector<Segment> parse_segments(const std::vector<std::string>& texts);

}  // namespace minference::cli
