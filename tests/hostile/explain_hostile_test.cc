// Bad input to `minference explain`: refused in one line, before the model is loaded where that is
// possible, and without a trace in the file system.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

namespace fs = std::filesystem;

ProcessResult explain(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"explain", "-m", cli_model()});
  return run_cli(arguments);
}

std::string folder_of_its_own() {
  const fs::path folder = fs::path(temporary_file("marker", "")).parent_path() / "explain";
  fs::remove_all(folder);
  fs::create_directory(folder);
  return folder.string();
}

std::string long_enough() { return temporary_file("prompt.txt", cli_text(1500)); }

TEST(HostileExplain, PlacesThatCannotHoldAReport) {
  const std::string folder = folder_of_its_own();
  const std::string file = folder + "/file";
  std::ofstream(file) << "x";
  // A model that cannot be loaded: the place is refused first.
  const std::string model = temporary_file("broken.gguf", "GGUF and nothing else");
  const auto into = [&](const std::string& place, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"explain", "-m", model, "-p", "Hello", "-o", place});
    return run_cli(more);
  };
  expect_refused(into("/dev/null/report"), {"/dev/null/report"});
  expect_refused(into(folder + "/no/such/report"), {folder + "/no/such/report", "No such file"});
  expect_refused(into(file), {file, "not a folder"});
  expect_refused(into(file, {"--force"}), {file, "not a folder"});
  expect_refused(into(folder), {folder, "not empty", "--force"});
  expect_refused(into(""), {"-o folder"});
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1);
}

TEST(HostileExplain, NothingIsLeftOfAFailure) {
  const std::string folder = folder_of_its_own();
  expect_refused(explain({"-p", "Hello", "-o", folder + "/new"}), {"tokens", "512 or more"});
  expect_refused(explain({"-f", long_enough(), "-o", folder + "/new", "--heads", "0:9"}),
                 {"0:9", "layers 0 to 29", "heads 0 to 8"});
  expect_refused(explain({"-f", long_enough(), "-o", folder, "-c", "256"}), {"256", "tokens"});
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(HostileExplain, Segments) {
  const std::string folder = folder_of_its_own();
  const auto with = [&](const std::string& segments, const std::string& attn = "mminference") {
    return explain({"-f", long_enough(), "-o", folder, "--attn", attn, "--segments", segments});
  };
  expect_refused(with("5:video"), {"'5:video'", "begin:end:visual"});
  expect_refused(with("0:100000:visual"), {"100000"});
  expect_refused(with("10:50:visual,40:60:visual"), {"40"});
  expect_refused(with("10:50:visual", "auto"), {"mminference", "auto"});
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(HostileExplain, Heads) {
  const std::string folder = folder_of_its_own();
  const auto with = [&](const std::string& heads) {
    return explain({"-p", "Hello", "-o", folder + "/new", "--heads=" + heads});
  };
  for (const char* heads :
       {"x", "3", "3:", ":5", "-1:0", "3:5,", "1:2:3", "99999999999999999999:0"}) {
    SCOPED_TRACE(heads);
    expect_refused(with(heads), {"is not a head", "layer:head"});
  }
  expect_refused(with("1:2,1:2"), {"1:2", "twice"});
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(HostileExplain, Options) {
  expect_refused(explain({"-p", "Hello"}), {"-o", "--text"});
  expect_refused(explain({"--text"}), {"explain needs a prompt", "-f"});
  expect_refused(explain({"-p", "", "--text"}), {"empty"});
  expect_refused(explain({"-p", "Hello", "--text", "--attn", "stock"}), {"stock"});
  expect_refused(explain({"-p", "Hello", "--text", "--json"}), {"--json", "--output"});
  expect_refused(explain({"-p", "Hello", "--text", "--heads", "0:0"}), {"--heads", "--output"});
  expect_refused(explain({"-p", "Hello", "--text", "--guard-rows", "0"}), {"'0'", "1 to 64"});
  expect_refused(explain({"-p", "Hello", "--text", "--attn-opt", "no_such=1"}), {"no_such"});
  expect_refused(run_cli({"explain", "-m", "/no/such.gguf", "-p", "Hello", "--text"}),
                 {"/no/such.gguf"});
}

}  // namespace
}  // namespace minference::testing
