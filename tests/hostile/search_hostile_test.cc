// Bad input to `minference search`: one line, exit code 2, and nothing written.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

namespace fs = std::filesystem;

// In a folder that is empty until then.
std::string output_path() {
  const fs::path folder = fs::path(temporary_file("marker", "")).parent_path() / "search";
  fs::remove_all(folder);
  fs::create_directory(folder);
  return folder / "pattern.json";
}

// A search on a long enough text with these arguments changed or added.
void expect_search_refused(const std::vector<std::string>& extra,
                           const std::vector<std::string>& parts) {
  const std::string output = output_path();
  std::vector<std::string> arguments = {
      "search", "-m", cli_model(), "-f", temporary_file("text.txt", cli_text(6000)), "-o", output};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  expect_refused(run_cli(arguments), parts);
  EXPECT_TRUE(fs::is_empty(fs::path(output).parent_path()));
}

TEST(SearchHostile, TextThatIsTooShort) {
  expect_search_refused({}, {"the text has ", "needs 8192", "--tokens takes 1024"});
  expect_search_refused({"--tokens", "4096"}, {"the text has ", "needs 4096"});
  const std::string longer = temporary_file("longer.txt", cli_text(60000));
  expect_refused(
      run_cli({"search", "-m", cli_model(), "-f", longer, "-o", output_path(), "--tokens", "9000"}),
      {"9000", "trained", "8192"});
  const std::string empty = temporary_file("empty.txt", "");
  expect_refused(run_cli({"search", "-m", cli_model(), "-f", empty, "-o", output_path()}),
                 {empty, "empty"});
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
    return run_cli({"search", "-m", model, "-f", file, "-o", output});
  };
  expect_refused(search("/no/such/model.gguf", text, output_path()), {"/no/such/model.gguf"});
  expect_refused(search(cli_model(), "/no/such.txt", output_path()), {"/no/such.txt"});
  expect_refused(search(cli_model(), text, "/no/such/folder/p.json"), {"/no/such/folder/p.json"});
  expect_refused(search(cli_model(), text, "/tmp"), {"/tmp", "regular file"});
  expect_refused(search(cli_model(), text, "/dev/null"), {"/dev/null", "regular file"});
  expect_refused(run_cli({"search", "-m", cli_model(), "-f", text, "-o", output_path(), "--report",
                          "/no/such/report.json"}),
                 {"/no/such/report.json"});
  expect_refused(run_cli({"search", "-m", cli_model(), "-f", text}), {"--output"});
  expect_refused(run_cli({"search", "-m", cli_model(), "-o", output_path()}), {"--file"});
}

// The state of another search, or no state at all: not overwritten, and the way out is named.
TEST(SearchHostile, StateOfAnotherSearch) {
  const std::string output = output_path();
  const std::string text = temporary_file("text.txt", cli_text(6000));
  const std::string partial = output + ".partial";
  std::ofstream(partial) << "minference search state 1\nbut not of this search";
  expect_refused(
      run_cli({"search", "-m", cli_model(), "-f", text, "-o", output, "--tokens", "1024"}),
      {partial, "another search", "--restart"});
  EXPECT_FALSE(fs::exists(output));
  EXPECT_TRUE(fs::exists(partial));
  fs::remove(partial);
}

// Found out only after the search, whose work is kept: the next budget needs only the prompt.
TEST(SearchHostile, BudgetThatBuysNothing) {
  const std::string output = output_path();
  const std::string text = temporary_file("text.txt", cli_text(6000));
  expect_refused(run_cli({"search", "-m", cli_model(), "-f", text, "-o", output, "--tokens", "1024",
                          "--budget", "0.0001"}),
                 {"budget", "0.0001", "to 1"});
  EXPECT_FALSE(fs::exists(output));
  EXPECT_TRUE(fs::exists(output + ".partial"));
  fs::remove(output + ".partial");
}

}  // namespace
}  // namespace minference::testing
