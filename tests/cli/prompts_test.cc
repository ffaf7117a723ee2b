// minference run --prompts: many prompts in one process.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

using Json = nlohmann::json;

ProcessResult run_prompts(const std::string& lines, std::vector<std::string> extra = {}) {
  std::vector<std::string> arguments = {"run", "-m", cli_model(), "-t", "2", "--prompts", "-"};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  return run_cli(arguments, {.input = lines});
}

std::vector<Json> answers_of(const ProcessResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  std::vector<Json> answers;
  std::istringstream text(result.out);
  for (std::string line; std::getline(text, line);) answers.push_back(Json::parse(line));
  return answers;
}

// Nothing of a prompt is left for the next one: neither keys nor what a method remembers.
TEST(Prompts, EachIsAnsweredAsIfAlone) {
  const Json book = {{"id", {{"page", 1}}}, {"prompt", cli_text(3000)}, {"chat", false}};
  const Json other = {{"prompt", cli_text(6000).substr(3000)}, {"tokens", 2}, {"chat", false}};
  const Json hello = {{"id", "hello"}, {"prompt", "Say hello."}};
  const std::vector<Json> answers = answers_of(
      run_prompts(book.dump() + "\n" + other.dump() + "\n\n" + hello.dump() + "\n" + book.dump(),
                  {"-n", "6", "--attn", "static", "--attn-opt", "vertical_size=30", "--attn-opt",
                   "slash_size=100"}));
  ASSERT_EQ(answers.size(), 4U);
  EXPECT_EQ(answers[0]["id"], book["id"]);
  EXPECT_TRUE(answers[1]["id"].is_null());
  EXPECT_EQ(answers[1]["answer_tokens"].size(), 2U);
  EXPECT_EQ(answers[2]["id"], "hello");
  EXPECT_TRUE(answers[2]["kept_fraction"].is_null());
  EXPECT_EQ(answers[3]["answer_tokens"], answers[0]["answer_tokens"]);
  EXPECT_EQ(answers[3]["kept_fraction"], answers[0]["kept_fraction"]);
  EXPECT_LT(answers[0]["kept_fraction"], 1.0);
}

TEST(Prompts, LinesOverrideTheOptions) {
  const std::vector<Json> counts = answers_of(run_prompts(R"({"prompt": "Hello"}
{"prompt": "Hello", "chat": false}
{"prompt": "Hello", "system": "You are a pirate who loves rum and the sea."})",
                                                          {"--count-tokens"}));
  ASSERT_EQ(counts.size(), 3U);
  EXPECT_GT(counts[0]["prompt_tokens"], counts[1]["prompt_tokens"]);
  EXPECT_NE(counts[0]["prompt_tokens"], counts[2]["prompt_tokens"]);
  EXPECT_EQ(counts[0]["trained_context"], 8192);
}

// All lines are checked before the first is computed.
TEST(Prompts, Refusals) {
  const std::string good = "{\"prompt\": \"Hello\"}\n";
  const auto refuse = [&](const std::string& line, const std::vector<std::string>& parts) {
    std::vector<std::string> all = {"standard input line 2"};
    all.insert(all.end(), parts.begin(), parts.end());
    expect_refused(run_prompts(good + line), all);
  };
  refuse("Hello", {"JSON object"});
  refuse("[1]", {"JSON object"});
  refuse(R"({"id": 1})", {"no prompt"});
  refuse(R"({"prompt": ""})", {"empty"});
  refuse(R"({"prompt": 3})", {"prompt", "string"});
  refuse(R"({"prompt": "a", "n": 3})", {"'n'", "id, prompt, tokens, system, chat"});
  for (const char* tokens : {"0", "-1", "1.5", "1e99", "99999999999999999999", "\"8\"", "null"}) {
    refuse(R"({"prompt": "a", "tokens": )" + std::string(tokens) + "}", {"tokens", "1 to 1048576"});
  }
  refuse(R"({"prompt": "a", "chat": 1})", {"chat", "true or false"});
  refuse(Json{{"prompt", cli_text(40000)}}.dump(), {"8192", "-c"});
  expect_refused(run_prompts(good + Json{{"prompt", cli_text(3000)}}.dump(), {"-c", "256"}),
                 {"standard input line 2", "the context holds 256"});
  expect_refused(run_prompts("{\"prompt\": \"\xFF\"}"), {"standard input", "UTF-8 at byte 12"});
  expect_refused(run_prompts("\n \n"), {"holds no prompts"});
  expect_refused(run_prompts(good, {"-p", "x"}), {"--prompt", "--prompts"});
  expect_refused(run_cli({"run", "-m", cli_model(), "--prompts", "/no/such.jsonl"}),
                 {"/no/such.jsonl", "No such file"});
}

}  // namespace
}  // namespace minference::testing
