#include "explain/report.h"

#include <algorithm>

#include "minference/version.h"

namespace minference::explain {
namespace {

constexpr std::size_t kListedHeads = 12;

long long shown(std::int64_t value) { return value; }

void print_stages(const ExplainReport& report, std::FILE* out) {
  std::fprintf(out, "\n%-24s %9s %7s\n", "stage", "seconds", "share");
  for (const Stage& stage : report.stages) {
    std::fprintf(out, "%-24s %9.3f %6.1f%%\n", stage.name.c_str(), stage.seconds,
                 100.0 * stage.seconds / report.ttft_seconds);
  }
  std::fprintf(out, "%-24s %9.3f\n", "time to first token", report.ttft_seconds);
}

bool keeps_everything(const AttentionFigures& figures) {
  for (std::int64_t layer = 0; layer < figures.layers(); ++layer) {
    const HeadFigures sum = figures.layer(layer);
    if (sum.steps == 0 || sum.kept_fraction() < 1.0) return false;
  }
  return true;
}

void print_layers(const ExplainReport& report, std::FILE* out) {
  const AttentionFigures& figures = report.figures;
  std::fprintf(out, "\n%5s %7s %9s %9s %6s   %s\n", "layer", "kept %", "recall %", "lowest %",
               "head", "heads dense, diagonal, blocks");
  for (std::int64_t layer = 0; layer < figures.layers(); ++layer) {
    const HeadFigures sum = figures.layer(layer);
    if (sum.steps == 0) {
      std::fprintf(out, "%5lld %7s %9s %9s %6s   not seen\n", shown(layer), "-", "-", "-", "-");
      continue;
    }
    const HeadId worst = figures.worst(layer);
    std::int64_t heads_of_kind[3] = {};
    for (std::int64_t head = 0; head < figures.heads(); ++head) {
      const HeadFigures& each = figures.at({layer, head});
      if (each.steps > 0) heads_of_kind[static_cast<int>(each.kind())] += 1;
    }
    std::fprintf(out, "%5lld %7.1f %9.2f %9.2f %6lld   %lld, %lld, %lld\n", shown(layer),
                 100.0 * sum.kept_fraction(), 100.0 * sum.recall(),
                 100.0 * figures.at(worst).recall(), shown(worst.head), shown(heads_of_kind[0]),
                 shown(heads_of_kind[1]), shown(heads_of_kind[2]));
  }
}

void print_worst(const ExplainReport& report, std::FILE* out) {
  std::vector<HeadId> worst = report.figures.by_recall();
  worst.resize(std::min(worst.size(), kListedHeads));
  std::fprintf(out, "\nlowest recall\n%5s %5s %9s %7s   %s\n", "layer", "head", "recall %",
               "kept %", "kind");
  for (const HeadId& id : worst) {
    const HeadFigures& figures = report.figures.at(id);
    const std::string pattern = pattern_text(report, id);
    std::fprintf(out, "%5lld %5lld %9.2f %7.1f   %s%s%s\n", shown(id.layer), shown(id.head),
                 100.0 * figures.recall(), 100.0 * figures.kept_fraction(),
                 kind_name(figures.kind()), pattern.empty() ? "" : ", ", pattern.c_str());
  }
}

}  // namespace

std::vector<ShownHead> empty_maps(const std::vector<HeadId>& heads, std::int64_t tokens) {
  std::vector<ShownHead> shown;
  shown.reserve(heads.size());
  for (const HeadId& id : heads) shown.push_back({id, AttentionMap(tokens)});
  return shown;
}

void add_maps(std::vector<ShownHead>& shown, const AttentionCall& call) {
  for (ShownHead& head : shown) {
    if (head.id.layer == call.layer && head.id.head < call.input->q.heads()) {
      head.map.add(*call.input, *call.params, call.index, head.id.head);
    }
  }
}

std::string pattern_text(const ExplainReport& report, const HeadId& id) {
  if (!report.patterns) return {};
  const HeadPattern pattern = report.patterns->at(id.layer, id.head);
  return std::string(pattern_kind_name(pattern.kind)) + " " + std::to_string(pattern.vertical) +
         ", " + std::to_string(pattern.slash);
}

void print_report(const ExplainReport& report, std::FILE* out) {
  const HeadFigures total = report.figures.total();
  std::fprintf(out, "model      %s", report.model.c_str());
  if (report.load_seconds) std::fprintf(out, ", loaded in %.2f s", *report.load_seconds);
  std::fprintf(out, "\n");
  std::fprintf(out, "prompt     %s, %lld tokens\n", report.prompt.c_str(),
               shown(report.prompt_tokens));
  std::fprintf(out, "attention  %s%s%s, kernels %s, %d threads\n", report.method.c_str(),
               report.options.empty() ? "" : " ", report.options.c_str(), report.isa.c_str(),
               report.threads);
  if (!report.segments.empty()) std::fprintf(out, "segments   %s\n", report.segments.c_str());
  std::fprintf(out, "kept       %.1f %% of the causal area, recall %.2f %% of the attention mass\n",
               100.0 * total.kept_fraction(), 100.0 * total.recall());
  for (const std::string& note : report.notes) std::fprintf(out, "note       %s\n", note.c_str());
  print_stages(report, out);
  if (keeps_everything(report.figures)) {
    std::fprintf(out, "\nEvery head of the %lld layers computed all of the causal area%s.\n",
                 shown(report.figures.layers()),
                 report.method == "dense"
                     ? ""
                     : ": the prompt is too short for the method to leave anything out");
    return;
  }
  print_layers(report, out);
  print_worst(report, out);
}

nlohmann::ordered_json report_json(const ExplainReport& report) {
  const HeadFigures total = report.figures.total();
  nlohmann::ordered_json json;
  json["minference"] = version();
  json["model"] = report.model;
  json["prompt"] = report.prompt;
  json["prompt_tokens"] = report.prompt_tokens;
  json["method"] = report.method;
  json["options"] = report.options;
  json["segments"] = report.segments;
  json["guard"] = report.guard;
  json["isa"] = report.isa;
  json["threads"] = report.threads;
  json["kept_fraction"] = total.kept_fraction();
  json["mass_recall"] = total.recall();
  json["guard_rows"] = report.guard_rows;
  if (report.load_seconds) json["load_seconds"] = *report.load_seconds;
  if (report.tokenise_seconds) json["tokenise_seconds"] = *report.tokenise_seconds;
  json["ttft_seconds"] = report.ttft_seconds;
  for (const Stage& stage : report.stages) json["stages"][stage.key] = stage.seconds;
  json["heads"] = nlohmann::ordered_json::array();
  for (std::int64_t layer = 0; layer < report.figures.layers(); ++layer) {
    for (std::int64_t head = 0; head < report.figures.heads(); ++head) {
      const HeadFigures& figures = report.figures.at({layer, head});
      if (figures.steps == 0) continue;
      nlohmann::ordered_json row = {{"layer", layer},
                                    {"head", head},
                                    {"kept_fraction", figures.kept_fraction()},
                                    {"mass_recall", figures.recall()},
                                    {"kind", kind_name(figures.kind())}};
      if (report.patterns) row["pattern"] = pattern_text(report, {layer, head});
      json["heads"].push_back(std::move(row));
    }
  }
  json["shown_heads"] = nlohmann::ordered_json::array();
  for (const ShownHead& head : report.heads) {
    json["shown_heads"].push_back({{"layer", head.id.layer}, {"head", head.id.head}});
  }
  json["notes"] = report.notes;
  return json;
}

}  // namespace minference::explain
