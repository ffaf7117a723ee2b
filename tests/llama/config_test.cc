// The plug-in's configuration: every variable, legal and illegal, from both sources.
#include "llama/plugin_config.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "minference/error.h"

namespace minference::llama_host {
namespace {

class Config : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  static void clear() {
    for (const Variable& variable : plugin_variables()) unsetenv(variable.name);
  }
  static PluginConfig with(const char* name, const char* value) {
    clear();
    setenv(name, value, 1);
    return config_from_environment();
  }
  // The message of the refusal; empty when it was accepted.
  static std::string refusal(const char* name, const char* value) {
    try {
      with(name, value);
      return {};
    } catch (const Error& e) {
      return e.what();
    }
  }
};

TEST_F(Config, Defaults) {
  const PluginConfig config = config_from_environment();
  EXPECT_EQ(config.attn, "auto");
  EXPECT_FALSE(config.stock());
  EXPECT_EQ(config.min_rows, 64);
  EXPECT_EQ(config.min_kv, 512);
  EXPECT_EQ(config.precision, Precision::kAuto);
  EXPECT_EQ(config.guard.mode, GuardMode::kOff);
  EXPECT_EQ(config.guard.rows, 16);
  EXPECT_EQ(config.guard.min_recall, 0.9);
  EXPECT_TRUE(config.linear);
  EXPECT_EQ(config.log, LogLevel::kLoadLine);
}

TEST_F(Config, EveryVariableArrives) {
  EXPECT_EQ(with("MINFERENCE_ATTN", "a_shape").attn, "a_shape");
  EXPECT_TRUE(with("MINFERENCE_ATTN", "stock").stock());
  EXPECT_EQ(with("MINFERENCE_MIN_ROWS", "128").min_rows, 128);
  EXPECT_EQ(with("MINFERENCE_MIN_KV", "1").min_kv, 1);
  EXPECT_EQ(with("MINFERENCE_PRECISION", "f32").precision, Precision::kF32);
  EXPECT_EQ(with("MINFERENCE_PRECISION", "bf16").precision, Precision::kBF16);
  EXPECT_FALSE(with("MINFERENCE_LINEAR", "0").linear);
  EXPECT_EQ(with("MINFERENCE_GUARD", "report").guard.mode, GuardMode::kReport);
  EXPECT_EQ(with("MINFERENCE_GUARD", "enforce").guard.mode, GuardMode::kEnforce);
  EXPECT_EQ(with("MINFERENCE_MIN_RECALL", "0.95").guard.min_recall, 0.95);
  EXPECT_EQ(with("MINFERENCE_GUARD_ROWS", "4").guard.rows, 4);
  EXPECT_EQ(with("MINFERENCE_LOG", "0").log, LogLevel::kQuiet);
  EXPECT_EQ(with("MINFERENCE_LOG", "1").log, LogLevel::kSummary);
  clear();
  setenv("MINFERENCE_ATTN", "vertical_slash", 1);
  setenv("MINFERENCE_ATTN_OPTS", "vertical_size=500,slash_size=700", 1);
  const PluginConfig config = config_from_environment();
  EXPECT_EQ(config.options.at("vertical_size"), 500);
  EXPECT_EQ(config.options.at("slash_size"), 700);
}

TEST_F(Config, IllegalValuesAreRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"MINFERENCE_ATTN", "foo"},
      {"MINFERENCE_LINEAR", "yes"},
      {"MINFERENCE_GUARD_ROWS", "65"},
      {"MINFERENCE_ATTN_OPTS", "nonsense"},
      {"MINFERENCE_ATTN_OPTS", "no_such_option=1"},
      {"MINFERENCE_ATTN_OPTS", "=,"},
      {"MINFERENCE_PATTERN", "/no/such/file.json"},
      {"MINFERENCE_MIN_ROWS", "63"},
      {"MINFERENCE_MIN_ROWS", "abc"},
      {"MINFERENCE_MIN_ROWS", "-64"},
      {"MINFERENCE_MIN_ROWS", "64 "},
      {"MINFERENCE_MIN_KV", "0"},
      {"MINFERENCE_MIN_KV", "99999999999999999999"},
      {"MINFERENCE_PRECISION", "fp8"},
      {"MINFERENCE_GUARD", "on"},
      {"MINFERENCE_GUARD_ROWS", "0"},
      {"MINFERENCE_LOG", "2"}};
  for (const auto& [name, value] : cases) {
    const std::string message = refusal(name, value);
    EXPECT_NE(message.find(name), std::string::npos) << name << "=" << value << ": " << message;
  }
  EXPECT_NE(refusal("MINFERENCE_MIN_ROWS", "63").find("from 64 to"), std::string::npos);
  EXPECT_NE(refusal("MINFERENCE_ATTN", "foo").find("vertical_slash"), std::string::npos);
}

TEST_F(Config, PatternNeedsItsMethod) {
  setenv("MINFERENCE_ATTN", "dense", 1);
  setenv("MINFERENCE_PATTERN", "x.json", 1);
  EXPECT_THROW(config_from_environment(), InvalidArgument);
}

TEST_F(Config, PatternGoesWithEveryMethodThatTakesOne) {
  const std::string path = ::testing::TempDir() + "minference_config_test_pattern.json";
  std::ofstream(path) << R"([{"0": ["stream_llm", 1, 2, 0]}])";
  const auto config = [&](const std::string& method) {
    return config_from_json(R"({"attn": ")" + method + R"(", "pattern": ")" + path + R"("})");
  };
  for (const char* method : {"minference", "tri_mix_minference"}) {
    EXPECT_NE(config(method).patterns, nullptr) << method;
  }
  EXPECT_EQ(config_from_json(R"({"pattern": ")" + path + R"("})").attn, "minference");
  for (const char* method : {"dense", "tri_mix", "stock"}) {
    try {
      config(method);
      ADD_FAILURE() << method << " was not refused";
    } catch (const InvalidArgument& error) {
      const std::string expected =
          std::string("needs the method minference or tri_mix_minference, not ") + method;
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
  std::remove(path.c_str());
}

TEST_F(Config, AnAliasIsItsMethod) {
  const PluginConfig config = with("MINFERENCE_ATTN", "strided");
  EXPECT_EQ(config.attn, "dilated2");
  EXPECT_NE(describe(config).find("attention dilated2"), std::string::npos);
}

TEST_F(Config, Json) {
  const PluginConfig config = config_from_json(
      R"({"attn": "vertical_slash", "options": {"vertical_size": 500}, "min_rows": 64, "log": 1})");
  EXPECT_EQ(config.attn, "vertical_slash");
  EXPECT_EQ(config.options.at("vertical_size"), 500);
  EXPECT_EQ(config.log, LogLevel::kSummary);
  // The environment plays no part.
  setenv("MINFERENCE_MIN_ROWS", "128", 1);
  EXPECT_EQ(config_from_json("{}").min_rows, 64);
  for (const char* bad : {"", "[]", "{", "{\"no_such_key\": 1}", "{\"min_rows\": 1}",
                          "{\"attn\": 7}", "{\"options\": {\"vertical_size\": \"x\"}}",
                          "{\"attn\": \"stock\", \"options\": {\"a\": 1}}"}) {
    EXPECT_THROW(config_from_json(bad), InvalidArgument) << bad;
  }
}

TEST_F(Config, LoadLineNamesTheMethod) {
  EXPECT_NE(describe(with("MINFERENCE_ATTN", "a_shape")).find("a_shape"), std::string::npos);
  EXPECT_NE(describe(with("MINFERENCE_ATTN", "stock")).find("stock"), std::string::npos);
}

TEST_F(Config, DocumentationListsEveryVariable) {
  std::ifstream file(MINFERENCE_TEST_SOURCE_DIR "/../docs/llama.md");
  std::stringstream text;
  text << file.rdbuf();
  for (const Variable& variable : plugin_variables()) {
    EXPECT_NE(text.str().find("| `" + std::string(variable.name) + "` |"), std::string::npos)
        << variable.name << " is missing in docs/llama.md";
  }
}

}  // namespace
}  // namespace minference::llama_host
