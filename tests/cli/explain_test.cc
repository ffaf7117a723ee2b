// `minference explain` with a real model: the report's files, the tables, the JSON.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

namespace fs = std::filesystem;

class Explain : public ::testing::Test {
 protected:
  void SetUp() override {
    prompt_ = temporary_file("play & <scene>.txt", cli_text(4000));
    folder_ = fs::path(prompt_).parent_path() / "report";
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  ProcessResult explain(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(),
                     {"explain", "-m", cli_model(), "-f", prompt_, "-t", "2", "--attn",
                      "vertical_slash", "--attn-opt", "vertical_size=50,slash_size=100"});
    return run_cli(arguments);
  }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::string prompt_;
  fs::path folder_;
};

TEST_F(Explain, WritesASelfContainedReport) {
  const ProcessResult result = explain({"-o", folder_.string(), "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("index.html"), std::string::npos) << result.err;

  const std::string html = read("index.html");
  EXPECT_EQ(html.find("<!doctype html>"), 0U);
  EXPECT_NE(html.find("</html>"), std::string::npos);
  // Nothing from a network, and no place of the template left empty.
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_EQ(html.find("src=\"//"), std::string::npos);
  EXPECT_EQ(html.find("@model@"), std::string::npos);
  EXPECT_EQ(html.find("@shown@"), std::string::npos);
  EXPECT_EQ(html.find("<scene>"), std::string::npos);
  EXPECT_NE(html.find("play &amp; &lt;scene&gt;.txt"), std::string::npos);
  EXPECT_NE(html.find("src=\"data:image/png;base64,"), std::string::npos);
  EXPECT_NE(html.find("layer 29, head 8: keeps"), std::string::npos);

  const nlohmann::json json = nlohmann::json::parse(read("report.json"));
  EXPECT_EQ(json["method"], "vertical_slash");
  EXPECT_EQ(json["heads"].size(), 30U * 9U);
  EXPECT_EQ(json["shown_heads"].size(), 8U);
  EXPECT_GT(json["kept_fraction"], 0.0);
  EXPECT_LT(json["kept_fraction"], 1.0);
  EXPECT_GT(json["mass_recall"], 0.3);
  EXPECT_LE(json["mass_recall"], 1.0);
  double stages = 0;
  for (const auto& [name, seconds] : json["stages"].items()) stages += seconds.get<double>();
  EXPECT_NEAR(stages, json["ttft_seconds"].get<double>(), 0.05 * stages);

  std::int64_t pictures = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    if (entry.path().extension() != ".png") continue;
    ++pictures;
    EXPECT_EQ(read(entry.path().filename().string()).substr(0, 8), "\x89PNG\r\n\x1A\n");
  }
  EXPECT_EQ(pictures, 3 + 3 * 8);
}

TEST_F(Explain, ShowsTheHeadsThatWereAskedFor) {
  ASSERT_EQ(explain({"-o", folder_.string(), "--heads", "3:5,0:0"}).exit_code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "attention-layer3-head5.png"));
  EXPECT_TRUE(fs::exists(folder_ / "kept-layer0-head0.png"));
  EXPECT_FALSE(fs::exists(folder_ / "report.json"));
  // The next report into the same folder replaces it, and only it.
  std::ofstream(folder_ / "mine.txt") << "mine";
  ASSERT_EQ(explain({"-o", folder_.string(), "--heads", "7:1", "--force"}).exit_code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "lost-layer7-head1.png"));
  EXPECT_FALSE(fs::exists(folder_ / "attention-layer3-head5.png"));
  EXPECT_TRUE(fs::exists(folder_ / "mine.txt"));
}

// The whole prompt one picture: what its lines lie on is kept, and the report says what was visual.
TEST_F(Explain, SegmentsReachTheMethod) {
  const auto kept = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"explain",    "-m",
                                          cli_model(),  "-f",
                                          prompt_,      "-t",
                                          "2",          "--no-chat",
                                          "--attn",     "mminference",
                                          "--attn-opt", "kind=3,vertical_size=40,slash_size=100",
                                          "-o",         folder_.string(),
                                          "--json",     "--force",
                                          "--heads",    "0:0",
                                          "--ubatch",   "512"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProcessResult result = run_cli(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(read("report.json"))["kept_fraction"].get<double>();
  };
  const double text = kept({});
  const std::string visual = "20:500:visual,500:600:text,600:1000:visual:100";
  EXPECT_GT(kept({"--segments", visual}), text);
  EXPECT_NE(read("index.html").find("segments 20:500:visual, 500:600:text"), std::string::npos);
  EXPECT_NE(read("report.json").find("600:1000:visual:100"), std::string::npos);
}

TEST_F(Explain, HelpHasExamples) {
  const ProcessResult help = run_cli({"explain", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.out.find("Examples"), std::string::npos) << help.out;
}

TEST_F(Explain, AnInterruptLeavesNothing) {
  const std::string prompt = temporary_file("long.txt", cli_text(22000));
  const ProcessResult result =
      run_cli({"explain", "-m", cli_model(), "-f", prompt, "-o", folder_.string()},
              {.interrupt_after_seconds = 1.5});
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(result.err, "");
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_.parent_path())) {
    EXPECT_EQ(entry.path().filename().string().find("report"), std::string::npos) << entry.path();
  }
}

// Kept fraction and recall are those that `run` reports.
TEST_F(Explain, AgreesWithRun) {
  ASSERT_EQ(explain({"-o", folder_.string(), "--heads", "0:0", "--json"}).exit_code, 0);
  const nlohmann::json explained = nlohmann::json::parse(read("report.json"));
  const ProcessResult result = run_cli(
      {"run", "-m", cli_model(), "-f", prompt_, "-n", "1", "--json", "-t", "2", "--guard", "report",
       "--attn", "vertical_slash", "--attn-opt", "vertical_size=50,slash_size=100"});
  const nlohmann::json run = nlohmann::json::parse(result.out);
  EXPECT_NEAR(explained["kept_fraction"].get<double>(), run["kept_fraction"].get<double>(), 1e-9);
  EXPECT_NEAR(explained["mass_recall"].get<double>(), run["mass_recall"].get<double>(), 1e-6);
}

TEST_F(Explain, PrintsTables) {
  const ProcessResult result = explain({"--text"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* word : {"matrix products", "attention kernels", "lowest recall", "diagonal",
                           "\n   29 ", "% of the causal area"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " is not in " << result.out;
  }
  EXPECT_FALSE(fs::exists(folder_));
}

TEST_F(Explain, SaysInASentenceThatNothingIsLeftOut) {
  const std::string prompt = temporary_file("short.txt", cli_text(2500));
  const ProcessResult result = run_cli({"explain", "-m", cli_model(), "-f", prompt, "--text"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("Every head of the 30 layers computed all of the causal area: the "
                            "prompt is too short"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(result.out.find("lowest recall"), std::string::npos) << result.out;
}

TEST_F(Explain, NamesThePatternsOfAFile) {
  std::string file;
  for (int layer = 0; layer < 30; ++layer) {
    file += (layer == 0 ? "[{" : ",{");
    for (int head = 0; head < 9; ++head) {
      file += (head == 0 ? "\"" : ",\"") + std::to_string(head) + R"(":["stream_llm",64,128,1])";
    }
    file += "}";
  }
  const std::string pattern = temporary_file("pattern.json", file + "]");
  const ProcessResult result =
      run_cli({"explain", "-m", cli_model(), "-f", prompt_, "--text", "--pattern", pattern});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("stream_llm 64, 128"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace minference::testing
