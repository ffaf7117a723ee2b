#include "methods/cost_model.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "attention/cpu/executor.h"
#include "core/parallel.h"
#include "core/replace_file.h"
#include "core/stopwatch.h"
#include "methods/synthetic_chunk.h"
#include "minference/attention.h"
#include "minference/error.h"
#include "minference/sparse_index.h"

namespace minference {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;  // of the file's contents and of what is measured

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 1);
  }
  return "unknown";
}

std::string key_of(IsaLevel level, std::int64_t head_dim, std::int64_t v_head_dim, int threads) {
  return std::string(isa_name(level)) + "/" + std::to_string(head_dim) + "/" +
         std::to_string(v_head_dim) + "/" + std::to_string(threads);
}

// A chunk in the middle of a prompt, large enough that packing K and V is shared as in real ones.
class Calibration {
 public:
  Calibration(IsaLevel level, std::int64_t head_dim, std::int64_t v_head_dim, int threads)
      : level_(level),
        heads_(2L * threads),
        chunk_({kRows, kKeys, heads_, heads_ / 2, head_dim, v_head_dim}, threads) {}

  CostModel measure() const {
    HeadIndex nearest;
    nearest.kind = HeadIndex::Kind::kDiagonal;
    nearest.runs = {{0, 1, 1}};
    HeadIndex runs = nearest;
    for (std::int64_t i = 1; i < 8; ++i) runs.runs.push_back({i * 384, i * 384 + 65, 1});
    HeadIndex columns = nearest;
    for (std::int64_t i = 0; i < 1024; ++i) columns.columns.push_back(i * 2);

    // Round by round, so that other work on the machine slows all of them or none.
    const HeadIndex* const heads[] = {nullptr, &nearest, &runs, &columns};
    Point points[4];
    double spent = 0;
    for (int round = 0; round < 8 && spent < 0.2; ++round) {
      for (int i = 0; i < 4; ++i) spent += time(heads[i], points[i]);
    }
    const auto& [dense, base, with_runs, with_columns] = points;
    CostModel model;
    model.dense_key = dense.seconds / dense.keys;
    // The same kernels compute all keys: whatever was measured, none is cheaper than a dense one.
    model.run_key = std::max(slope(base, with_runs), model.dense_key);
    model.column_key = std::max(slope(base, with_columns), model.dense_key);
    model.row_block = std::max(base.seconds - model.run_key * base.keys, 0.0);
    return model;
  }

 private:
  static constexpr std::int64_t kRows = 1024;
  static constexpr std::int64_t kKeys = 4096;

  // One row block of one head.
  struct Point {
    double seconds = 0;
    double keys = 0;
  };

  static double slope(const Point& a, const Point& b) {
    return (b.seconds - a.seconds) / (b.keys - a.keys);
  }

  // Runs once, keeps the fastest in `point` and returns the seconds that passed.
  double time(const HeadIndex* head, Point& point) const {
    SparseIndex index{1, heads_, {}, 0.0};
    if (head != nullptr) index.heads.assign(heads_, *head);
    const Stopwatch watch;
    const Stats stats = attention_cpu(chunk_.input(), chunk_.params(), chunk_.output(),
                                      head == nullptr ? nullptr : &index, level_);
    const double seconds = watch.seconds();
    const std::int64_t row_blocks = heads_ * kRows / kRowBlock;
    const double each = seconds * chunk_.params().threads / static_cast<double>(row_blocks);
    point.seconds = point.keys == 0 ? each : std::min(point.seconds, each);
    point.keys = static_cast<double>(stats.kept_pairs) / static_cast<double>(heads_ * kRows);
    return seconds;
  }

  IsaLevel level_;
  std::int64_t heads_;
  SyntheticChunk chunk_;
};

json read_file(const std::string& path) {
  std::ifstream file(path);
  const json root = json::parse(file, nullptr, false);
  const bool ours = root.is_object() && root.value("version", json()) == kVersion &&
                    root.value("processor", json()) == processor() && root.contains("models") &&
                    root["models"].is_object();
  return ours ? root
              : json{{"version", kVersion}, {"processor", processor()}, {"models", json::object()}};
}

bool read_model(const json& root, const std::string& key, CostModel& model) {
  const json entry = root["models"].value(key, json());
  if (!entry.is_object()) return false;
  const auto read = [&](const char* name, double& value) {
    const json number = entry.value(name, json());
    if (!number.is_number()) return false;
    value = number.get<double>();
    return value >= 0.0 && value < 1.0;
  };
  return read("dense_key", model.dense_key) && read("run_key", model.run_key) &&
         read("column_key", model.column_key) && read("row_block", model.row_block);
}

void write_model(const std::string& path, const std::string& key, const CostModel& model) {
  json root = read_file(path);
  root["models"][key] = {{"dense_key", model.dense_key},
                         {"run_key", model.run_key},
                         {"column_key", model.column_key},
                         {"row_block", model.row_block}};
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  try {
    replace_file(path, root.dump(2) + "\n");
  } catch (const IoError&) {
    // The next process measures again.
  }
}

}  // namespace

std::string cost_model_path() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  std::filesystem::path folder = variable("MINFERENCE_CACHE");
  if (folder.empty() && !variable("XDG_CACHE_HOME").empty()) {
    folder = std::filesystem::path(variable("XDG_CACHE_HOME")) / "minference";
  }
  if (folder.empty() && !variable("HOME").empty()) {
    folder = std::filesystem::path(variable("HOME")) / ".cache" / "minference";
  }
  return folder.empty() ? std::string() : (folder / "attention-costs.json").string();
}

CostModel cost_model(IsaLevel level, std::int64_t head_dim, std::int64_t v_head_dim, int threads) {
  static std::mutex mutex;
  static std::map<std::string, CostModel> known;
  threads = resolve_threads(threads);
  const std::string key = key_of(level, head_dim, v_head_dim, threads);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const std::string path = cost_model_path();
  CostModel model;
  if (path.empty() || !read_model(read_file(path), key, model)) {
    model = Calibration(level, head_dim, v_head_dim, threads).measure();
    if (!path.empty()) write_model(path, key, model);
  }
  return known[key] = model;
}

}  // namespace minference
