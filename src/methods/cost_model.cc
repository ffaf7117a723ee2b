#include "methods/cost_model.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "attention/cpu/executor.h"
#include "core/float16.h"
#include "core/parallel.h"
#include "minference/attention.h"
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
      : level_(level), heads_(2L * threads) {
    params_.threads = threads;
    q_.resize(kRows * heads_ * head_dim);
    k_.resize(kKeys * heads_ / 2 * head_dim);
    v_.resize(kKeys * heads_ / 2 * v_head_dim);
    out_.resize(kRows * heads_ * v_head_dim);
    // Values as attention has them: no timing of infinities or denormals.
    std::uint32_t state = 1;
    const auto next = [&] {
      state = state * 1664525U + 1013904223U;
      return static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
    };
    for (float& x : q_) x = next();
    for (std::uint16_t& x : k_) x = f32_to_f16(next());
    for (std::uint16_t& x : v_) x = f32_to_f16(next());
    input_.q = TensorView::contiguous(q_.data(), DType::kF32, {1, kRows, heads_, head_dim});
    input_.k = TensorView::contiguous(k_.data(), DType::kF16, {1, kKeys, heads_ / 2, head_dim});
    input_.v = TensorView::contiguous(v_.data(), DType::kF16, {1, kKeys, heads_ / 2, v_head_dim});
    output_.out = TensorView::contiguous(out_.data(), DType::kF32, {1, kRows, heads_, v_head_dim});
  }

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
    const auto start = std::chrono::steady_clock::now();
    const Stats stats =
        attention_cpu(input_, params_, output_, head == nullptr ? nullptr : &index, level_);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto row_blocks = static_cast<double>(heads_ * kRows / kRowBlock);
    const double each = seconds * params_.threads / row_blocks;
    point.seconds = point.keys == 0 ? each : std::min(point.seconds, each);
    point.keys = static_cast<double>(stats.kept_pairs) / static_cast<double>(heads_ * kRows);
    return seconds;
  }

  IsaLevel level_;
  std::int64_t heads_;
  AttentionParams params_;
  AttentionInput input_;
  AttentionOutput output_;
  std::vector<float> q_;
  std::vector<std::uint16_t> k_;
  std::vector<std::uint16_t> v_;
  mutable std::vector<float> out_;
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

// Another process may do the same at the same time: the file is replaced as a whole.
void write_model(const std::string& path, const std::string& key, const CostModel& model) {
  json root = read_file(path);
  root["models"][key] = {{"dense_key", model.dense_key},
                         {"run_key", model.run_key},
                         {"column_key", model.column_key},
                         {"row_block", model.row_block}};
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  const std::string temporary =
      path + "." + std::to_string(std::chrono::steady_clock::now().time_since_epoch().count());
  std::ofstream file(temporary);
  file << root.dump(2) << '\n';
  file.close();
  if (file) {
    std::filesystem::rename(temporary, path, ignored);
  } else {
    std::filesystem::remove(temporary, ignored);
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
