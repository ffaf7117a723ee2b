// The command line: what each sub-command prints and returns.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

TEST(Cli, HelpAndVersion) {
  const ProcessResult help = run_cli({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"run", "serve", "bench", "perplexity", "explain", "search", "doctor",
                           "list", "Exit codes"}) {
    EXPECT_NE(help.out.find(word), std::string::npos) << word;
  }
  for (const char* command :
       {"run", "serve", "bench", "perplexity", "explain", "search", "doctor", "list"}) {
    const ProcessResult result = run_cli({command, "--help"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.out.find("Example"), std::string::npos) << command;
  }
  const ProcessResult version = run_cli({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.find("minference "), 0U);
}

TEST(Cli, ListNamesMethodsAndDefaults) {
  const ProcessResult result = run_cli({"list"});
  EXPECT_EQ(result.exit_code, 0);
  for (const char* word :
       {"vertical_slash", "a_shape", "minference", "dense", "stock", "vertical_size",
        "default 1000", "tri_shape", "static", "alias: strided", "inf_llm", "mminference",
        "exc_block_size", "default 512; multiples of 64 from 64 to 16384",
        "default 8; divisors of 64 from 1 to 64"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word;
  }
  // What no command takes.
  EXPECT_EQ(result.out.find("KV method"), std::string::npos) << result.out;
}

TEST(Cli, ShippedPatternsAreListedAndTakenByName) {
  const ProcessResult list = run_cli({"list"});
  const std::string name = "smollm2-135m-instruct";
  EXPECT_NE(list.out.find("\n  " + name + "\n"), std::string::npos) << list.out;
  const std::string prompt = temporary_file("shipped.txt", cli_text(9000));
  const ProcessResult result =
      run_cli({"run", "-m", cli_model(), "-f", prompt, "-n", "1", "--json", "--pattern", name});
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(Cli, DoctorPassesHere) {
  const ProcessResult result = run_cli({"doctor"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("generic"), std::string::npos);
  EXPECT_NE(result.out.find("loads         yes"), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("FAILED"), std::string::npos) << result.out;
  EXPECT_LT(result.seconds, 30.0);
}

TEST(Cli, DoctorHonoursAForcedLevel) {
  const ProcessResult result =
      run_cli({"doctor"}, {.environment = {{"MINFERENCE_FORCE_ISA", "generic"}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("chosen        generic"), std::string::npos) << result.out;
}

TEST(Cli, DoctorSaysWhyThereIsNoCuda) {
  const ProcessResult result =
      run_cli({"doctor"}, {.environment = {{"MINFERENCE_CUDA_LIBRARY", "/missing/cuda.so"}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("CUDA\n  not usable    no CUDA kernels: /missing/cuda.so: cannot open"),
            std::string::npos)
      << result.out;
}

nlohmann::json run_json(std::vector<std::string> arguments, const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), {"run", "-m", cli_model(), "--json", "-t", "2"});
  const ProcessResult result = run_cli(arguments, options);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const nlohmann::json json = nlohmann::json::parse(result.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << result.out;
  return json;
}

TEST(Cli, RunPrintsOneJsonObject) {
  const std::string prompt = temporary_file("prompt.txt", cli_text(3000) + "\nWho speaks here?\n");
  const nlohmann::json json =
      run_json({"-f", prompt, "-n", "8", "--attn", "vertical_slash", "--attn-opt",
                "vertical_size=50", "--attn-opt", "slash_size=100", "--guard", "report"});
  std::set<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.insert(key);
  EXPECT_EQ(keys,
            (std::set<std::string>{"model", "method", "prompt_tokens", "answer_tokens", "answer",
                                   "load_seconds", "ttft_seconds", "prefill_tokens_per_second",
                                   "decode_tokens_per_second", "kept_fraction", "mass_recall",
                                   "index_seconds", "guard_seconds", "attention_seconds",
                                   "linear_seconds", "threads", "isa", "fallbacks", "declined"}));
  EXPECT_EQ(json["method"], "vertical_slash");
  EXPECT_EQ(json["threads"], 2);
  EXPECT_GT(json["prompt_tokens"], 500);
  EXPECT_LE(json["answer_tokens"].size(), 8U);
  EXPECT_GT(json["ttft_seconds"], 0.0);
  EXPECT_GT(json["kept_fraction"], 0.0);
  EXPECT_LT(json["kept_fraction"], 1.0);
  EXPECT_GT(json["mass_recall"], 0.3);
  EXPECT_LE(json["mass_recall"], 1.0);
  EXPECT_TRUE(json["fallbacks"].empty());
}

// Segments arrive in every prefill step: each step sees the same boundaries of the whole prompt.
TEST(Cli, SegmentsReachTheMethod) {
  const std::string prompt = temporary_file("segments.txt", cli_text(4500));
  const auto kept = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"-f",
                                          prompt,
                                          "-n",
                                          "2",
                                          "--no-chat",
                                          "--attn",
                                          "mminference",
                                          "--ubatch",
                                          "512",
                                          "--attn-opt",
                                          "vertical_size=40,slash_size=100"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const nlohmann::json json = run_json(arguments);
    EXPECT_EQ(json["method"], "mminference");
    EXPECT_TRUE(json["fallbacks"].empty());
    return json["kept_fraction"].get<double>();
  };
  const double text = kept({});
  EXPECT_LT(text, 0.9);
  const std::string visual = "20:500:visual,500:600:text,600:1000:visual:100";
  EXPECT_GT(kept({"--segments", visual, "--attn-opt", "kind=3"}), text);
  EXPECT_EQ(kept({"--segments", visual, "--attn-opt", "kind=4"}), text);
}

// The chat template of the model adds the start token, and the tokenizer adds no second one: the
// same prompt without the template is shorter, and both count what they should.
TEST(Cli, ChatTemplateIsApplied) {
  const nlohmann::json chat = run_json({"-p", "Say hello.", "-n", "1"});
  const nlohmann::json raw = run_json({"-p", "Say hello.", "-n", "1", "--no-chat"});
  const nlohmann::json system =
      run_json({"-p", "Say hello.", "-n", "1", "--system", "You are a pirate who loves rum."});
  EXPECT_GT(chat["prompt_tokens"].get<int>(), raw["prompt_tokens"].get<int>() + 5);
  EXPECT_NE(chat["prompt_tokens"], system["prompt_tokens"]);
  EXPECT_LE(raw["prompt_tokens"], 4);
}

TEST(Cli, StockReportsNoFiguresOfOurs) {
  const nlohmann::json json = run_json({"-p", "Hello", "-n", "2", "--attn", "stock"});
  EXPECT_EQ(json["method"], "stock");
  for (const char* key :
       {"kept_fraction", "mass_recall", "index_seconds", "attention_seconds", "isa"}) {
    EXPECT_TRUE(json[key].is_null()) << key;
  }
}

TEST(Cli, GreedyIsRepeatableAndSeedsCount) {
  const auto answer = [](std::vector<std::string> extra) {
    extra.insert(extra.begin(), {"-p", "Tell me a story about a fox.", "-n", "12"});
    return run_json(extra)["answer_tokens"];
  };
  EXPECT_EQ(answer({}), answer({}));
  EXPECT_EQ(answer({"--temp", "1.5", "--seed", "3"}), answer({"--temp", "1.5", "--seed", "3"}));
  EXPECT_NE(answer({"--temp", "1.5", "--seed", "3"}), answer({"--temp", "1.5", "--seed", "4"}));
}

TEST(Cli, StandardInputAndFileAreTheSame) {
  const std::string text = "What is the capital of France?";
  const nlohmann::json file = run_json({"-f", temporary_file("q.txt", text), "-n", "4"});
  const nlohmann::json input = run_json({"-f", "-", "-n", "4"}, {.input = text});
  EXPECT_EQ(file["answer_tokens"], input["answer_tokens"]);
  EXPECT_EQ(file["prompt_tokens"], input["prompt_tokens"]);
}

TEST(Cli, VariablesAreTheDefaultsOfTheOptions) {
  const nlohmann::json variable =
      run_json({"-p", "Hello", "-n", "1"}, {.environment = {{"MINFERENCE_ATTN", "a_shape"}}});
  EXPECT_EQ(variable["method"], "a_shape");
  const nlohmann::json option = run_json({"-p", "Hello", "-n", "1", "--attn", "dense"},
                                         {.environment = {{"MINFERENCE_ATTN", "a_shape"}}});
  EXPECT_EQ(option["method"], "dense");
}

TEST(Cli, TextGoesToStandardOutputAndFiguresToTheOther) {
  const ProcessResult result = run_cli({"run", "-m", cli_model(), "-p", "Say hello.", "-n", "8"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_FALSE(result.out.empty());
  EXPECT_EQ(result.out.find("tokens/s"), std::string::npos);
  EXPECT_NE(result.err.find("first token after"), std::string::npos) << result.err;
  // No progress line when standard error is no terminal.
  EXPECT_EQ(result.err.find('\r'), std::string::npos);
}

TEST(Cli, TheLayerTableIsPrintedOnRequest) {
  const std::string prompt = temporary_file("table.txt", cli_text(3000));
  const ProcessResult result =
      run_cli({"run", "-m", cli_model(), "-f", prompt, "-n", "1", "--json"},
              {.environment = {{"MINFERENCE_LOG", "1"}}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("     all "), std::string::npos) << result.err;
}

// Longer than the trained context: a warning that names both, and it runs.
TEST(Cli, ContextBeyondTrainingWarns) {
  const ProcessResult result =
      run_cli({"run", "-m", cli_model(), "-p", "Hello", "-n", "1", "-c", "9000", "--json"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("warning"), std::string::npos);
  EXPECT_NE(result.err.find("9000"), std::string::npos);
  EXPECT_NE(result.err.find("8192"), std::string::npos);
}

TEST(Cli, AnswerStopsWhereTheContextEnds) {
  const std::string prompt = temporary_file("full.txt", cli_text(550));
  const ProcessResult result =
      run_cli({"run", "-m", cli_model(), "-f", prompt, "--no-chat", "-n", "400", "-c", "256"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("the context is full"), std::string::npos) << result.err;
}

TEST(Cli, InterruptStopsWithinASecond) {
  const std::string prompt = temporary_file("long.txt", cli_text(22000));
  const ProcessResult result = run_cli({"run", "-m", cli_model(), "-f", prompt, "-n", "8"},
                                       {.interrupt_after_seconds = 2.0});
  EXPECT_EQ(result.exit_code, 130);
  // One operation may be under way; on a machine that others use too, it takes its time.
  EXPECT_LT(result.seconds, 2.0 + 3.0);
  EXPECT_EQ(result.err, "");
}

TEST(Cli, ServeAnswersHelpOfTheServer) {
  const ProcessResult result =
      run_cli({"serve", "-m", cli_model(), "--attn", "vertical_slash", "--", "--version"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("version"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace minference::testing
