#include "llama/plugin_stats.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace minference::llama_host {
namespace {

nlohmann::json to_json(const LayerTotals& totals) {
  nlohmann::json recall;  // null
  if (totals.stats.recall_count > 0) recall = totals.stats.mass_recall();
  nlohmann::json isa;  // null
  if (totals.calls > 0) isa = isa_name(totals.stats.isa);
  return {{"method", totals.stats.method},
          {"isa", isa},
          {"calls", totals.calls},
          {"kept_pairs", totals.stats.kept_pairs},
          {"causal_pairs", totals.stats.causal_pairs},
          {"index_seconds", totals.stats.index_seconds},
          {"kernel_seconds", totals.stats.kernel_seconds},
          {"guard_seconds", totals.stats.guard_seconds},
          {"total_seconds", totals.total_seconds},
          {"mass_recall", recall},
          {"fallbacks", totals.stats.fallbacks}};
}

std::string table_line(const std::string& name, const LayerTotals& totals) {
  char recall[16] = "-";
  if (totals.stats.recall_count > 0) {
    std::snprintf(recall, sizeof(recall), "%.4f", totals.stats.mass_recall());
  }
  std::int64_t fallbacks = 0;
  for (const auto& [reason, times] : totals.stats.fallbacks) fallbacks += times;
  char line[160];
  std::snprintf(line, sizeof(line), "%8s %8lld %-16.16s %8.2f %9.3f %9.3f %9.3f %9s %9lld\n",
                name.c_str(), static_cast<long long>(totals.calls), totals.stats.method.c_str(),
                100.0 * totals.stats.kept_fraction(), totals.stats.index_seconds,
                totals.stats.kernel_seconds, totals.total_seconds, recall,
                static_cast<long long>(fallbacks));
  return line;
}

}  // namespace

void LayerTotals::add(const LayerTotals& other) {
  calls += other.calls;
  stats.add(other.stats);
  total_seconds += other.total_seconds;
}

void StatsBoard::add(std::int64_t layer, const LayerTotals& totals) {
  const std::lock_guard<std::mutex> lock(mutex_);
  layers_[layer].add(totals);
}

void StatsBoard::add_linear(double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++linear_calls_;
  linear_seconds_ += seconds;
}

bool StatsBoard::add_declined(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return declined_.insert(reason).second;
}

void StatsBoard::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  layers_.clear();
  linear_calls_ = 0;
  linear_seconds_ = 0;
  declined_.clear();
}

LayerTotals StatsBoard::sum_locked() const {
  LayerTotals sum;
  for (const auto& [layer, totals] : layers_) sum.add(totals);
  return sum;
}

std::string StatsBoard::json() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  nlohmann::json root = to_json(sum_locked());
  root["layers"] = nlohmann::json::array();
  for (const auto& [layer, totals] : layers_) {
    nlohmann::json entry = to_json(totals);
    entry["layer"] = layer;
    root["layers"].push_back(std::move(entry));
  }
  root["linear_calls"] = linear_calls_;
  root["linear_seconds"] = linear_seconds_;
  root["declined"] = declined_;
  return root.dump();
}

std::string StatsBoard::table() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layers_.empty()) return {};
  std::string text =
      "minference:\n"
      "   layer    calls method            kept %   index s  kernel s   total s    recall "
      "fallbacks\n";
  for (const auto& [layer, totals] : layers_) {
    text += table_line(layer < 0 ? "none" : std::to_string(layer), totals);
  }
  const LayerTotals sum = sum_locked();
  text += table_line("all", sum);
  if (linear_calls_ > 0) {
    char line[96];
    std::snprintf(line, sizeof(line), "matrix products: %lld calls, %.3f s\n",
                  static_cast<long long>(linear_calls_), linear_seconds_);
    text += line;
  }
  for (const auto& [reason, times] : sum.stats.fallbacks) {
    text += "fallback to exact attention, " + std::to_string(times) + " times: " + reason + "\n";
  }
  for (const std::string& reason : declined_) text += "left to llama.cpp: " + reason + "\n";
  return text;
}

}  // namespace minference::llama_host
