// The report of `explain`: its data, and the three forms in which it is given to people and programs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "explain/figures.h"
#include "explain/picture.h"
#include "guard/attention_map.h"
#include "minference/pattern.h"

namespace minference::explain {

// A part of the time to first token.
struct Stage {
  std::string key;   // in report.json
  std::string name;  // for people
  std::string help;
  double seconds = 0;
};

struct ShownHead {
  HeadId id;
  AttentionMap map;
};

struct ExplainReport {
  std::string model;   // file name
  std::string prompt;  // file name, or what stands for it
  std::int64_t prompt_tokens = 0;
  std::int64_t step_tokens = 0;  // of a prefill step
  std::string method;            // name
  std::string options;           // key=value ..., or empty
  std::string segments;          // as given, or empty
  std::string guard;             // off, report, enforce
  std::string isa;               // kernel level
  int threads = 0;
  // Of what the host did before the prompt was given; nothing where the caller did it.
  std::optional<double> load_seconds;
  std::optional<double> tokenise_seconds;
  double ttft_seconds = 0;  // the sum of the stages; without what explaining took
  std::vector<Stage> stages;
  std::int64_t guard_rows = 0;
  AttentionFigures figures;
  std::shared_ptr<const PatternFile> patterns;  // null without --pattern
  std::vector<ShownHead> heads;
  std::vector<std::string> notes;  // fallbacks and the like, a sentence each
};

// Heads to show, nothing on their maps yet.
std::vector<ShownHead> empty_maps(const std::vector<HeadId>& heads, std::int64_t tokens);

// Adds a call to the maps of those that are heads of its layer.
void add_maps(std::vector<ShownHead>& shown, const AttentionCall& call);

// "vertical_and_slash 1000, 6096" of the pattern file; empty without one.
std::string pattern_text(const ExplainReport& report, const HeadId& id);

// Tables for a terminal.
void print_report(const ExplainReport& report, std::FILE* out);

// The content of report.json.
nlohmann::ordered_json report_json(const ExplainReport& report);

// One file of the report.
struct ReportFile {
  std::string name;
  std::string content;
};

// index.html, last, and the pictures that it holds, as files of their own.
std::vector<ReportFile> report_files(const ExplainReport& report, const PngEncoder& encode_png);

}  // namespace minference::explain
