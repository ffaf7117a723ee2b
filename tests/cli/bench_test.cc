// minference bench: its tables, its JSON, and what it does when it is interrupted or a run fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "minference/isa.h"
#include "support/cli.h"

namespace minference::testing {
namespace {

std::set<std::string> keys_of(const nlohmann::json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

// The JSON object that `bench` prints, and nothing else.
nlohmann::json bench_json(std::vector<std::string> arguments, const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), {"bench", "--json", "-t", "2"});
  const ProcessResult result = run_cli(arguments, options);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  nlohmann::json json = nlohmann::json::parse(result.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << result.out;
  EXPECT_EQ(keys_of(json["machine"]),
            (std::set<std::string>{"processor", "threads", "isa", "minference", "ggml", "date"}));
  EXPECT_EQ(json["machine"]["threads"], 2);
  return json;
}

// Rows of the kernel `name`, one per level where it is ours.
std::int64_t count_rows(const nlohmann::json& json, const std::string& name) {
  return std::count_if(json["rows"].begin(), json["rows"].end(),
                       [&](const nlohmann::json& row) { return row["kernel"] == name; });
}

TEST(Bench, AttentionTable) {
  const nlohmann::json json =
      bench_json({"--attention", "--tokens", "256,1k", "-r", "1", "--head-dim", "64", "--heads",
                  "2", "--kv-heads", "1", "--kept", "30"});
  EXPECT_EQ(json["bench"], "attention");
  const auto levels = static_cast<std::int64_t>(available_isa_levels().size());
  EXPECT_EQ(count_rows(json, "ggml"), 2);
  for (const char* kernel : {"dense", "vertical_slash", "diagonal", "block"}) {
    EXPECT_EQ(count_rows(json, kernel), 2 * levels) << kernel;
  }
  for (const nlohmann::json& row : json["rows"]) {
    EXPECT_EQ(keys_of(row),
              (std::set<std::string>{"tokens", "head_dim", "q_heads", "kv_heads", "kernel", "isa",
                                     "min_seconds", "median_seconds", "max_seconds", "gflops",
                                     "gflops_median", "fraction_of_dense_rate", "kept_fraction",
                                     "index_seconds", "relative_error"}));
    EXPECT_GT(row["gflops"], 0.0);
    EXPECT_LE(row["min_seconds"], row["median_seconds"]);
    EXPECT_LT(row["relative_error"], 0.05);
    EXPECT_EQ(row["fraction_of_dense_rate"].is_null(),
              row["kernel"] == "ggml" || row["kernel"] == "dense");
    if (row["tokens"] == 1024 && (row["kernel"] == "diagonal" || row["kernel"] == "block")) {
      EXPECT_NEAR(row["kept_fraction"].get<double>(), 0.3, 0.1) << row;
    }
  }
  ASSERT_EQ(json["one_head_index"].size(), 2U);
  EXPECT_GT(json["one_head_index"][1]["fraction_of_dense"], 0.0);
}

TEST(Bench, LinearTable) {
  const nlohmann::json json = bench_json(
      {"--linear", "-p", "65", "--rows", "130", "--cols", "512", "--type", "q4_1,bf16", "-r", "1"});
  EXPECT_EQ(json["bench"], "linear");
  EXPECT_EQ(count_rows(json, "ggml"), 2);
  EXPECT_EQ(count_rows(json, "linear"),
            2 * static_cast<std::int64_t>(available_isa_levels().size()));
  for (const nlohmann::json& row : json["rows"]) {
    EXPECT_EQ(keys_of(row),
              (std::set<std::string>{"tokens", "rows", "cols", "type", "kernel", "isa",
                                     "min_seconds", "median_seconds", "max_seconds", "gflops",
                                     "gflops_median", "relative_error"}));
    EXPECT_LT(row["relative_error"], 0.02);
  }
}

TEST(Bench, TablesForReadingHaveAHeaderAndARowPerKernel) {
  const ProcessResult result =
      run_cli({"bench", "--attention", "-p", "128", "-r", "1", "--head-dim", "32", "--heads", "1",
               "--kv-heads", "1", "--isa", "generic", "--no-peer"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const char* word : {"min ms", "median ms", "GFLOP/s", "of dense %", "dense",
                           "vertical_slash", "last-q index of one head"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word;
  }
  EXPECT_EQ(result.out.find("ggml"), std::string::npos);
}

TEST(Bench, TimeToFirstToken) {
  const std::string text = temporary_file("bench.txt", cli_text(6000));
  const std::string output = temporary_file("bench.json", "");
  const nlohmann::json json = bench_json(
      {"-m", cli_model(), "-p", "512,600", "--prompt-file", text, "-n", "3", "-o", output, "--attn",
       "dense,stock,vertical_slash:vertical_size=50:slash_size=100", "--guard", "report"});
  EXPECT_EQ(json["bench"], "ttft");
  EXPECT_EQ(json["model"], "smollm2-135m-instruct-q4_1.gguf");
  ASSERT_EQ(json["rows"].size(), 6U);
  for (const nlohmann::json& row : json["rows"]) {
    EXPECT_EQ(keys_of(row), (std::set<std::string>{"tokens",
                                                   "prompt_tokens",
                                                   "attention",
                                                   "ttft_seconds",
                                                   "ttft_median_seconds",
                                                   "all_ttft_seconds",
                                                   "speedup_over_stock",
                                                   "peak_mib",
                                                   "prefill_tokens_per_second",
                                                   "attention_seconds",
                                                   "index_seconds",
                                                   "linear_seconds",
                                                   "kept_fraction",
                                                   "mass_recall",
                                                   "decode_tokens_per_second",
                                                   "load_seconds",
                                                   "answer_tokens",
                                                   "threads",
                                                   "isa",
                                                   "fallbacks",
                                                   "declined"}));
    EXPECT_LE(row["prompt_tokens"], row["tokens"]);
    EXPECT_GE(row["prompt_tokens"].get<int>(), row["tokens"].get<int>() - 16);
    EXPECT_GT(row["ttft_seconds"], 0.0);
    EXPECT_EQ(row["answer_tokens"].size(), 3U);
    // The model alone is 98 MB; far more than that and the bench measures itself.
    EXPECT_GT(row["peak_mib"], 90.0);
    EXPECT_LT(row["peak_mib"], 1000.0);
  }
  // Stock comes first and is what the others are compared with.
  EXPECT_EQ(json["rows"][0]["attention"], "stock");
  EXPECT_EQ(json["rows"][0]["speedup_over_stock"], 1.0);
  EXPECT_TRUE(json["rows"][0]["kept_fraction"].is_null());
  EXPECT_EQ(json["rows"][1]["attention"], "dense");
  EXPECT_EQ(json["rows"][5]["attention"], "vertical_slash:vertical_size=50:slash_size=100");
  EXPECT_LT(json["rows"][5]["kept_fraction"], 1.0);
  EXPECT_GT(json["rows"][5]["mass_recall"], 0.3);

  std::ifstream file(output);
  EXPECT_EQ(nlohmann::json::parse(file, nullptr, false), json);
}

TEST(Bench, BuiltInPromptIsTheSameEveryTime) {
  const auto tokens = [] {
    const nlohmann::json json =
        bench_json({"-m", cli_model(), "-p", "256", "--attn", "dense", "-r", "2", "-n", "4"});
    EXPECT_EQ(json["rows"][0]["all_ttft_seconds"].size(), 2U);
    EXPECT_TRUE(json["rows"][0]["speedup_over_stock"].is_null());
    return std::pair(json["rows"][0]["prompt_tokens"], json["rows"][0]["answer_tokens"]);
  };
  EXPECT_EQ(tokens(), tokens());
}

// Options of the plug-in in the environment must not leak into methods that lack them.
TEST(Bench, VariablesForOneMethodDoNotReachTheOthers) {
  const nlohmann::json json =
      bench_json({"-m", cli_model(), "-p", "128", "--attn", "stock,dense", "-n", "1"},
                 {.environment = {{"MINFERENCE_ATTN", "vertical_slash"},
                                  {"MINFERENCE_ATTN_OPTS", "vertical_size=50"}}});
  EXPECT_EQ(json["rows"].size(), 2U);
  EXPECT_TRUE(json["rows"][0]["decode_tokens_per_second"].is_null());
}

TEST(Bench, TableForReading) {
  const ProcessResult result =
      run_cli({"bench", "-m", cli_model(), "-p", "128", "--attn", "stock,dense", "-r", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  // No progress line when standard error is no terminal.
  EXPECT_EQ(result.err, "");
  for (const char* word :
       {"tokens", "attention", "TTFT s", "median s", "peak MiB", "stock", "dense", "1.00x"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in\n" << result.out;
  }
  EXPECT_EQ(result.out.find("recall"), std::string::npos);
}

// Whether a process has `word` among its arguments.
bool somebody_runs_with(const std::string& word) {
  namespace fs = std::filesystem;
  for (const fs::directory_entry& process : fs::directory_iterator("/proc")) {
    std::ifstream file(process.path() / "cmdline");
    std::stringstream arguments;
    arguments << file.rdbuf();
    if (arguments.str().find(word) != std::string::npos) return true;
  }
  return false;
}

TEST(Bench, InterruptEndsTheRunningCellToo) {
  // A name of its own, by which its processes are found.
  const std::string model = temporary_file("interrupted.gguf", "");
  std::filesystem::remove(model);
  std::filesystem::create_symlink(cli_model(), model);
  const std::string output = temporary_file("interrupted.json", "");
  const ProcessResult result =
      run_cli({"bench", "-m", model, "-p", "128,8k", "--attn", "dense,stock", "-o", output},
              {.interrupt_after_seconds = 5.0});
  EXPECT_EQ(result.exit_code, 130) << result.out;
  EXPECT_FALSE(somebody_runs_with(model));
  EXPECT_LT(result.seconds, 5.0 + 3.0);
  EXPECT_EQ(result.err, "");
  // What was measured before is not lost.
  std::ifstream file(output);
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  ASSERT_TRUE(json.is_object());
  EXPECT_GE(json["rows"].size(), 2U);
}

}  // namespace
}  // namespace minference::testing
