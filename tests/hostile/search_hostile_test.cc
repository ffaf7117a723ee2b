// Bad input to `minference search`: one line, exit code 2, and nothing written.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

namespace fs = std::filesystem;

std::string output_path() {
  std::string path = temporary_file("pattern.json", "");
  fs::remove(path);
  return path;
}

void expect_refused(const std::vector<std::string>& arguments,
                    const std::vector<std::string>& parts, const std::string& output = {}) {
  const ProcessResult result = run_cli(arguments);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.find("minference: error: "), 0U) << result.err;
  EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  for (const std::string& part : parts) {
    EXPECT_NE(result.err.find(part), std::string::npos)
        << "'" << part << "' is not in: " << result.err;
  }
  if (!output.empty()) {
    EXPECT_FALSE(fs::exists(output));
  }
}

// A search on a long enough text with these arguments changed or added.
void expect_search_refused(const std::vector<std::string>& extra,
                           const std::vector<std::string>& parts) {
  const std::string output = output_path();
  std::vector<std::string> arguments = {
      "search", "-m", cli_model(), "-f", temporary_file("text.txt", cli_text(6000)), "-o", output};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  expect_refused(arguments, parts, output);
  EXPECT_FALSE(fs::exists(output + ".partial"));
  EXPECT_FALSE(fs::exists(output + ".tmp"));
}

TEST(SearchHostile, TextThatIsTooShort) {
  expect_search_refused({}, {"the text has ", "needs 8192", "--tokens takes 1024"});
  expect_search_refused({"--tokens", "4096"}, {"the text has ", "needs 4096"});
  const std::string longer = temporary_file("longer.txt", cli_text(60000));
  expect_refused(
      {"search", "-m", cli_model(), "-f", longer, "-o", output_path(), "--tokens", "9000"},
      {"9000", "trained", "8192"});
  const std::string empty = temporary_file("empty.txt", "");
  expect_refused({"search", "-m", cli_model(), "-f", empty, "-o", output_path()}, {empty, "empty"});
}

TEST(SearchHostile, NumbersOutsideTheirRange) {
  expect_search_refused({"--tokens", "1023"}, {"1023", "1024 to"});
  expect_search_refused({"--budget", "1.5"}, {"1.5", "0 to 1"});
  expect_search_refused({"--budget=-0.1"}, {"-0.1", "0 to 1"});
  expect_search_refused({"--budget", "nan"}, {"nan", "0 to 1"});
  expect_search_refused({"--rows", "65"}, {"65", "1 to 64"});
  expect_search_refused({"--rows", "0"}, {"0", "1 to 64"});
  expect_search_refused({"--ubatch", "63"}, {"63", "64 to 16384"});
  expect_search_refused({"--costs", "1,2,3"}, {"--costs"});
  expect_search_refused({"--costs", "1,2,3,-4,5"}, {"-4", "0 to 1000"});
  expect_search_refused({"--costs", "1,1,1,1,1", "--calibrate"}, {"--calibrate", "--costs"});
}

TEST(SearchHostile, FilesThatCannotBeUsed) {
  const std::string text = temporary_file("text.txt", cli_text(6000));
  const auto search = [&](const std::string& model, const std::string& file,
                          const std::string& output) {
    return std::vector<std::string>{"search", "-m", model, "-f", file, "-o", output};
  };
  expect_refused(search("/no/such/model.gguf", text, output_path()), {"/no/such/model.gguf"});
  expect_refused(search(cli_model(), "/no/such.txt", output_path()), {"/no/such.txt"});
  expect_refused(search(cli_model(), text, "/no/such/folder/p.json"), {"/no/such/folder/p.json"});
  expect_refused(search(cli_model(), text, "/tmp"), {"/tmp", "regular file"});
  expect_refused(search(cli_model(), text, "/dev/null"), {"/dev/null", "regular file"});
  std::vector<std::string> report = search(cli_model(), text, output_path());
  report.insert(report.end(), {"--report", "/no/such/report.json"});
  expect_refused(report, {"/no/such/report.json"});
  expect_refused({"search", "-m", cli_model(), "-f", text}, {"--output"});
  expect_refused({"search", "-m", cli_model(), "-o", output_path()}, {"--file"});
}

// The state of another search, or no state at all: not overwritten, and the way out is named.
TEST(SearchHostile, StateOfAnotherSearch) {
  const std::string output = output_path();
  const std::string text = temporary_file("text.txt", cli_text(6000));
  const std::string partial = output + ".partial";
  std::ofstream(partial) << "minference search state 1\nbut not of this search";
  expect_refused({"search", "-m", cli_model(), "-f", text, "-o", output, "--tokens", "1024"},
                 {partial, "another search", "--restart"}, output);
  EXPECT_TRUE(fs::exists(partial));
  fs::remove(partial);
}

// Found out only after the search, whose work is kept: the next budget needs only the prompt.
TEST(SearchHostile, BudgetThatBuysNothing) {
  const std::string output = output_path();
  const std::string text = temporary_file("text.txt", cli_text(6000));
  expect_refused({"search", "-m", cli_model(), "-f", text, "-o", output, "--tokens", "1024",
                  "--budget", "0.0001"},
                 {"budget", "0.0001", "to 1"}, output);
  EXPECT_TRUE(fs::exists(output + ".partial"));
  fs::remove(output + ".partial");
}

}  // namespace
}  // namespace minference::testing
