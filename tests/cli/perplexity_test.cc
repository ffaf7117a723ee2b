// minference perplexity: windows, figures, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

ProcessResult perplexity(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"perplexity", "-m", cli_model(), "-t", "2"});
  return run_cli(arguments);
}

nlohmann::json perplexity_json(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const ProcessResult result = perplexity(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const nlohmann::json json = nlohmann::json::parse(result.out, nullptr, false);
  EXPECT_TRUE(json.is_object()) << result.out;
  return json;
}

std::string text_file() { return temporary_file("text.txt", cli_text(8000)); }

TEST(Perplexity, DenseIsWithinOnePercentOfStock) {
  const std::string text = text_file();
  const std::vector<std::string> shared = {"-f",  text,        "-c", "600",   "--last",
                                           "256", "--windows", "2",  "--attn"};
  const auto with = [&](const std::string& method) {
    std::vector<std::string> arguments = shared;
    arguments.push_back(method);
    return perplexity_json(arguments);
  };
  const nlohmann::json stock = with("stock");
  const nlohmann::json dense = with("dense");
  EXPECT_NEAR(dense["perplexity"].get<double>() / stock["perplexity"].get<double>(), 1.0, 0.01);
  EXPECT_TRUE(stock["kept_fraction"].is_null());
  EXPECT_EQ(dense["kept_fraction"], 1.0);
}

TEST(Perplexity, JsonHasTheFiguresOfEachWindow) {
  const nlohmann::json json = perplexity_json(
      {"-f", text_file(), "-c", "700", "--last", "100", "--windows", "2", "--attn", "a_shape",
       "--attn-opt", "n_init=32", "--attn-opt", "n_local=128", "--guard", "report"});
  EXPECT_EQ(json["method"], "a_shape");
  EXPECT_EQ(json["context"], 700);
  EXPECT_EQ(json["last"], 100);
  EXPECT_EQ(json["machine"]["threads"], 2);
  EXPECT_GT(json["standard_error"], 0.0);
  EXPECT_LT(json["kept_fraction"], 0.9);
  EXPECT_LT(json["mass_recall"], 1.0);
  ASSERT_EQ(json["windows"].size(), 2U);
  EXPECT_EQ(json["windows"][0]["first_token"], 0);
  EXPECT_GE(json["windows"][1]["first_token"], 700);
  double loss = 0;
  for (const nlohmann::json& window : json["windows"]) {
    loss += window["mean_loss"].get<double>() / 2;
    EXPECT_NEAR(window["perplexity"].get<double>(), std::exp(window["mean_loss"].get<double>()),
                1e-6);
    EXPECT_GT(window["prefill_seconds"], 0.0);
    EXPECT_GT(window["mass_recall"], 0.3);
  }
  EXPECT_NEAR(json["mean_loss"].get<double>(), loss, 1e-9);
  EXPECT_NEAR(json["perplexity"].get<double>(), std::exp(loss), 1e-6);
}

// The rows that score lie in steps of any size, the first of them in the step before.
TEST(Perplexity, StepsDoNotMatter) {
  const std::string text = text_file();
  const auto with_step = [&](const char* step) {
    return perplexity_json({"-f", text, "-c", "512", "--last", "128", "--windows", "1", "--attn",
                            "dense", "--ubatch", step})["perplexity"]
        .get<double>();
  };
  const double whole = with_step("512");
  EXPECT_NEAR(with_step("128") / whole, 1.0, 0.01);
  EXPECT_NEAR(with_step("100") / whole, 1.0, 0.01);
}

TEST(Perplexity, TableForReading) {
  const ProcessResult result = perplexity(
      {"-f", text_file(), "-c", "256", "--last", "64", "--windows", "2", "--attn", "stock"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.find(" first token  perplexity"), 0U) << result.out;
  EXPECT_NE(result.out.find("the last 64 tokens of 2 windows of 256, stock"), std::string::npos)
      << result.out;
}

TEST(Perplexity, Refusals) {
  const std::string text = text_file();
  expect_refused(perplexity({"-f", text, "-c", "2000", "--windows", "40", "--attn", "stock"}),
                 {"text.txt", "tokens", "80000"});
  expect_refused(perplexity({"-f", text, "-c", "1024", "--last", "1024"}),
                 {"--last 1024", "1 to 1023"});
  expect_refused(perplexity({"-f", text, "-c", "1", "--last", "1"}), {"-c 1", "2"});
  expect_refused(perplexity({"-f", text, "-c", "8193", "--attn", "stock"}), {"8193", "8192"});
  expect_refused(perplexity({"-f", text}), {"--ctx"});
  expect_refused(perplexity({"-c", "1024"}), {"--file"});
  expect_refused(perplexity({"-f", text, "-c", "2000", "--windows", "0"}), {"'0'", "1 to"});
  expect_refused(perplexity({"-f", "/no/such/text", "-c", "2000"}), {"/no/such/text"});
  expect_refused(perplexity({"-f", text, "-c", "2000", "--attn", "none"}), {"none", "dense"});
  expect_refused(perplexity({"-f", text, "-c", "2000", "--attn", "a_shape", "--attn-opt", "x=1"}),
                 {"'x'", "n_local"});
}

}  // namespace
}  // namespace minference::testing
