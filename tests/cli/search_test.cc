// minference search: what it writes, that runs take it, and that it goes on after an interruption.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

namespace fs = std::filesystem;

// A path in the folder of the running test's files where nothing is yet.
std::string fresh_path(const std::string& name) {
  std::string path = temporary_file(name, "");
  fs::remove(path);
  return path;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

ProcessResult search(const std::string& output, std::vector<std::string> extra,
                     const ProcessOptions& options = {}) {
  const std::string text = temporary_file("text.txt", cli_text(6000));
  std::vector<std::string> arguments = {"search", "-m",       cli_model(), "-f",       text, "-o",
                                        output,   "--tokens", "1024",      "--ubatch", "256"};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  return run_cli(arguments, options);
}

TEST(CliSearch, WritesPatternsThatRunsTake) {
  const std::string output = fresh_path("found.json");
  const std::string report_path = fresh_path("report.json");
  const ProcessResult result = search(output, {"--budget", "0.4", "--report", report_path});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_NE(result.out.find("recall %"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("  all "), std::string::npos) << result.out;
  EXPECT_FALSE(fs::exists(output + ".partial"));

  const nlohmann::json patterns = nlohmann::json::parse(content_of(output));
  ASSERT_EQ(patterns.size(), 30U);
  for (const nlohmann::json& layer : patterns) EXPECT_EQ(layer.size(), 9U);
  const nlohmann::json report = nlohmann::json::parse(content_of(report_path));
  EXPECT_EQ(report["tokens"], 1024);
  EXPECT_EQ(report["share"], "shared");
  EXPECT_LE(report["cost"], 0.4);
  EXPECT_GT(report["cost"], 0.35);
  EXPECT_GT(report["mass_recall"], 0.8);
  ASSERT_EQ(report["heads"].size(), 270U);
  const nlohmann::json& head = report["heads"][100];
  EXPECT_EQ(head["layer"], 11);
  EXPECT_EQ(head["head"], 1);
  EXPECT_EQ(patterns[11]["1"],
            (nlohmann::json{head["type"], head["vertical"], head["slash"], head["score"]}));

  const std::string prompt = temporary_file("prompt.txt", cli_text(4000));
  const ProcessResult run = run_cli({"run", "-m", cli_model(), "-f", prompt, "-n", "1", "--json",
                                     "--pattern", output, "--guard", "report"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_LT(json["kept_fraction"], 0.7);
  EXPECT_GT(json["mass_recall"], 0.8);
}

TEST(CliSearch, EqualBudgetsHoldForEveryHead) {
  const std::string report_path = fresh_path("report.json");
  const ProcessResult result =
      search(fresh_path("equal.json"),
             {"--budget", "0.5", "--equal", "--report", report_path, "--costs", "1,1,1,1,1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json report = nlohmann::json::parse(content_of(report_path));
  EXPECT_EQ(report["costs"]["columns"], 1.0);
  for (const nlohmann::json& head : report["heads"]) EXPECT_LE(head["cost"], 0.5);
}

// Wherever the interruption falls, even before anything is saved: the file comes out the same.
TEST(CliSearch, AnInterruptedSearchGoesOn) {
  const std::string whole = fresh_path("whole.json");
  const std::string resumed = fresh_path("resumed.json");
  const ProcessResult first = search(whole, {"-t", "2"});
  EXPECT_EQ(first.exit_code, 0) << first.err;
  const ProcessResult broken =
      search(resumed, {"-t", "2"}, {.interrupt_after_seconds = 0.7 * first.seconds});
  if (broken.exit_code != 0) {
    EXPECT_EQ(broken.exit_code, 130);
    EXPECT_FALSE(fs::exists(resumed));
    EXPECT_NE(broken.err.find("interrupted; the same command goes on"), std::string::npos)
        << broken.err;
    EXPECT_EQ(search(resumed, {"-t", "1"}).exit_code, 0);
  }
  EXPECT_EQ(content_of(resumed), content_of(whole));
  EXPECT_FALSE(fs::exists(resumed + ".partial"));
}

}  // namespace
}  // namespace minference::testing
