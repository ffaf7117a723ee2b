#include "cli/search_report.h"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace minference::cli {
namespace {

// Sums over some heads.
struct Summary {
  std::array<int, 3> kinds{};
  double kept = 0;
  double cost = 0;
  double recall = 0;
  double score = 0;

  void add(const HeadChoice& choice) {
    ++kinds[static_cast<std::size_t>(choice.pattern.kind)];
    kept += choice.kept;
    cost += choice.cost;
    recall += choice.recall;
    score += choice.pattern.score;
  }
  double heads() const { return kinds[0] + kinds[1] + kinds[2]; }

  std::string line(const std::string& name) const {
    char text[128];
    std::snprintf(text, sizeof(text), "%5s  %18d  %10d  %12d  %6.1f  %6.1f  %8.2f  %5.3f\n",
                  name.c_str(), kinds[0], kinds[1], kinds[2], 100 * kept / heads(),
                  100 * cost / heads(), 100 * recall / heads(), score / heads());
    return text;
  }
};

}  // namespace

std::string search_table(const SearchReport& report) {
  std::string table =
      "layer  vertical_and_slash  stream_llm  block_sparse  kept %  cost %  recall %  score\n";
  Summary all;
  Summary layer;
  for (std::size_t i = 0; i < report.choices.size(); ++i) {
    const HeadChoice& choice = report.choices[i];
    layer.add(choice);
    all.add(choice);
    if (i + 1 == report.choices.size() || report.choices[i + 1].layer != choice.layer) {
      table += layer.line(std::to_string(choice.layer));
      layer = {};
    }
  }
  return table + all.line("all");
}

std::string search_json(const SearchReport& report) {
  nlohmann::ordered_json json;
  json["model"] = report.model;
  json["tokens"] = report.tokens;
  json["chunk"] = report.chunk;
  json["sampled_rows"] = report.rows;
  json["candidates"] = report.candidates;
  json["budget"] = report.budget;
  json["share"] = report.share == BudgetShare::kShared ? "shared" : "equal";
  json["costs"] = {{"runs", report.costs.runs},
                   {"columns", report.costs.columns},
                   {"window", report.costs.window},
                   {"blocks", report.costs.blocks},
                   {"estimate", report.costs.estimate}};
  Summary all;
  for (const HeadChoice& choice : report.choices) all.add(choice);
  json["kept_fraction"] = all.kept / all.heads();
  json["cost"] = all.cost / all.heads();
  json["mass_recall"] = all.recall / all.heads();
  json["score"] = all.score / all.heads();
  json["heads"] = nlohmann::ordered_json::array();
  for (const HeadChoice& choice : report.choices) {
    json["heads"].push_back({{"layer", choice.layer},
                             {"head", choice.head},
                             {"type", pattern_kind_name(choice.pattern.kind)},
                             {"vertical", choice.pattern.vertical},
                             {"slash", choice.pattern.slash},
                             {"score", choice.pattern.score},
                             {"mass_recall", choice.recall},
                             {"kept_fraction", choice.kept},
                             {"cost", choice.cost}});
  }
  return json.dump(1) + "\n";
}

}  // namespace minference::cli
