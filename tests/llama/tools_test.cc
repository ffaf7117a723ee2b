// The plug-in in llama.cpp's own, unmodified programs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "llama/model.h"
#include "support/process.h"

namespace minference::testing {
namespace {

constexpr char kPlugin[] = MINFERENCE_TEST_BIN_DIR "/libggml-minference.so";

std::string tool(const std::string& name) { return MINFERENCE_TEST_BIN_DIR "/" + name; }

using Environment = std::map<std::string, std::string>;

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

constexpr char kLoadLine[] = "minference: attention ";
constexpr char kTableTitle[] = "minference:\n   layer ";

// Lists the devices: the quickest thing that loads the backends.
ProcessResult list_devices(const Environment& environment) {
  return run_process({tool("llama-bench"), "--list-devices"}, {.environment = environment});
}

TEST(Tools, EnvironmentVariableLoadsThePlugin) {
  const ProcessResult result = list_devices({{"GGML_BACKEND_PATH", kPlugin}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.err, kLoadLine), 1U) << result.err;
}

TEST(Tools, QuietOnRequest) {
  const ProcessResult result =
      list_devices({{"GGML_BACKEND_PATH", kPlugin}, {"MINFERENCE_LOG", "0"}});
  EXPECT_EQ(result.err.find("minference:"), std::string::npos) << result.err;
}

TEST(Tools, IllegalVariableIsRefusedInOneLineAndTheHostRunsOn) {
  for (const auto& [name, value] : {std::pair{"MINFERENCE_ATTN", "no_such_method"},
                                    {"MINFERENCE_MIN_KV", "-1"},
                                    {"MINFERENCE_FORCE_ISA", "no_such_level"}}) {
    const ProcessResult result = list_devices({{"GGML_BACKEND_PATH", kPlugin}, {name, value}});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    // llama-bench tries twice.
    EXPECT_EQ(count_of(result.err, std::string("minference: error: ") + name), 2U) << result.err;
    EXPECT_EQ(count_of(result.err, "minference: "), 2U) << result.err;
    EXPECT_NE(result.err.find(value), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find(kLoadLine), std::string::npos) << result.err;
  }
}

struct Perplexity {
  double value = NAN;
  std::string err;
};

Perplexity perplexity(int chunk, int chunks, const Environment& environment) {
  std::ifstream file(text_path("othello_gut.txt"), std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  const std::string path = temporary_file("perplexity.txt", text.str().substr(0, 80000));
  const ProcessResult result =
      run_process({tool("llama-perplexity"), "-m", model_path(), "-f", path, "-c",
                   std::to_string(chunk), "-b", std::to_string(chunk), "-ub", std::to_string(chunk),
                   "--chunks", std::to_string(chunks), "-fa", "on", "-t", "2"},
                  {.environment = environment, .timeout_seconds = 500});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  Perplexity found;
  found.err = result.err;
  std::smatch match;
  const std::string all = result.out + result.err;
  if (std::regex_search(all, match, std::regex("Final estimate: PPL = ([0-9.]+)"))) {
    found.value = std::stod(match[1]);
  }
  return found;
}

// The plug-in in a program whose search order it leads, as users of builds with linked-in backends
// load it.
TEST(Tools, PreloadLoadsThePlugin) {
  const Perplexity result = perplexity(
      1024, 1, {{"LD_PRELOAD", kPlugin}, {"MINFERENCE_ATTN", "dense"}, {"MINFERENCE_LOG", "1"}});
  EXPECT_TRUE(std::isfinite(result.value));
  EXPECT_EQ(count_of(result.err, kLoadLine), 1U) << result.err;
  EXPECT_EQ(count_of(result.err, kTableTitle), 1U) << result.err;
}

TEST(Tools, PreloadAndVariableTogetherLoadOnce) {
  const Perplexity result = perplexity(1024, 1,
                                       {{"LD_PRELOAD", kPlugin},
                                        {"GGML_BACKEND_PATH", kPlugin},
                                        {"MINFERENCE_ATTN", "dense"},
                                        {"MINFERENCE_LOG", "1"}});
  EXPECT_TRUE(std::isfinite(result.value));
  EXPECT_EQ(count_of(result.err, kLoadLine), 1U) << result.err;
  EXPECT_EQ(count_of(result.err, kTableTitle), 1U) << result.err;
  EXPECT_EQ(result.err.find("error"), std::string::npos) << result.err;
}

// 8 chunks of 2048 tokens. The bound leaves room for bf16 products: one chunk of a crude probe
// differed by 0.11 %.
TEST(Tools, PerplexityOfDenseIsThatOfStock) {
  constexpr int kChunk = 2048;
  constexpr int kChunks = 8;
  const Perplexity stock = perplexity(kChunk, kChunks, {});
  ASSERT_TRUE(std::isfinite(stock.value));
  std::printf("  stock: %.4f\n", stock.value);
  const auto report = [&](const char* name, const Environment& environment) {
    Environment all = environment;
    all["GGML_BACKEND_PATH"] = kPlugin;
    all["MINFERENCE_LOG"] = "1";
    const Perplexity result = perplexity(kChunk, kChunks, all);
    const double change = result.value / stock.value - 1.0;
    std::printf("  %s: %.4f (%+.3f %%)\n", name, result.value, 100.0 * change);
    EXPECT_EQ(count_of(result.err, kTableTitle), 1U) << result.err;
    EXPECT_EQ(count_of(result.err, "fallback"), 1U) << "more than the table's title\n"
                                                    << result.err;
    return change;
  };
  EXPECT_LT(std::abs(report("dense", {{"MINFERENCE_ATTN", "dense"}})), 0.002);
  EXPECT_TRUE(std::isfinite(report(
      "vertical_slash 200 + 300", {{"MINFERENCE_ATTN", "vertical_slash"},
                                   {"MINFERENCE_ATTN_OPTS", "vertical_size=200,slash_size=300"}})));
}

}  // namespace
}  // namespace minference::testing
