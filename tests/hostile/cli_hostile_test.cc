// Bad input through the command line: one line that names the value and what is legal, exit code 2,
// no crash.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/cli.h"

namespace minference::testing {
namespace {

ProcessResult run_with(std::vector<std::string> arguments, const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), {"run", "-m", cli_model()});
  return run_cli(arguments, options);
}

ProcessResult run_model(const std::string& model) {
  return run_cli({"run", "-m", model, "-p", "Hello", "-n", "1"});
}

void append_u32(std::string& bytes, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFF);
}
void append_u64(std::string& bytes, std::uint64_t value) {
  append_u32(bytes, static_cast<std::uint32_t>(value));
  append_u32(bytes, static_cast<std::uint32_t>(value >> 32));
}
void append_string(std::string& bytes, const std::string& text) {
  append_u64(bytes, text.size());
  bytes += text;
}

// A GGUF without tensors and with the architecture as its only metadata.
std::string gguf_of_architecture(const std::string& name) {
  std::string bytes = "GGUF";
  append_u32(bytes, 3);  // version
  append_u64(bytes, 0);  // tensors
  append_u64(bytes, 1);  // key-value pairs
  append_string(bytes, "general.architecture");
  append_u32(bytes, 8);  // string
  append_string(bytes, name);
  bytes.resize((bytes.size() + 31) / 32 * 32);
  return bytes;
}

TEST(Hostile, MissingModel) {
  expect_refused(run_model("/no/such/model.gguf"), {"/no/such/model.gguf", "no such file"});
}

TEST(Hostile, DirectoryAsModel) { expect_refused(run_model("/tmp"), {"/tmp", "directory"}); }

TEST(Hostile, FileThatIsNoGguf) {
  const std::string path = temporary_file("text.gguf", "This is no model.");
  expect_refused(run_model(path), {path, "not a GGUF file"});
}

TEST(Hostile, EmptyModelFile) {
  const std::string path = temporary_file("empty.gguf", "");
  expect_refused(run_model(path), {path, "not a GGUF file"});
}

TEST(Hostile, TruncatedModel) {
  std::ifstream file(cli_model(), std::ios::binary);
  std::string bytes(20'000'000, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const std::string path = temporary_file("truncated.gguf", bytes);
  expect_refused(run_model(path), {path, "corrupted or incomplete"});
}

TEST(Hostile, ModelCutInItsMetadata) {
  std::ifstream file(cli_model(), std::ios::binary);
  std::string bytes(3000, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const std::string path = temporary_file("cut.gguf", bytes);
  expect_refused(run_model(path), {path});
}

TEST(Hostile, UnsupportedArchitecture) {
  const std::string path = temporary_file("arch.gguf", gguf_of_architecture("no_such_arch"));
  expect_refused(run_model(path), {path, "no_such_arch"});
}

TEST(Hostile, UnreadableModel) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads everything";
  const std::string path = temporary_file("secret.gguf", "GGUF");
  chmod(path.c_str(), 0);
  expect_refused(run_model(path), {path, "Permission denied"});
}

TEST(Hostile, NoPrompt) { expect_refused(run_with({}), {"-p", "-f"}); }

TEST(Hostile, EmptyPrompt) {
  expect_refused(run_with({"-p", ""}), {"empty"});
  expect_refused(run_with({"-f", "-"}), {"standard input", "empty"});
  const std::string path = temporary_file("empty.txt", "");
  expect_refused(run_with({"-f", path}), {path, "empty"});
}

TEST(Hostile, PromptFileThatCannotBeRead) {
  expect_refused(run_with({"-f", "/no/such/prompt.txt"}), {"/no/such/prompt.txt", "No such file"});
  expect_refused(run_with({"-f", "/tmp"}), {"/tmp", "directory"});
}

TEST(Hostile, TwoPrompts) { expect_refused(run_with({"-p", "a", "-f", "b"}), {"-p", "-f"}); }

TEST(Hostile, InvalidUtf8NamesTheByte) {
  expect_refused(run_with({"-p", "abc\xFFzz"}), {"UTF-8", "byte 3"});
  expect_refused(run_with({"-f", "-"}, {.input = "gr\xC3\xBC\xC3"}), {"UTF-8", "byte 4"});
}

TEST(Hostile, PromptLongerThanTheContext) {
  const std::string path = temporary_file("long.txt", cli_text(4000));
  expect_refused(run_with({"-f", path, "-c", "256"}), {"tokens, the context holds 256"});
  expect_refused(run_with({"-f", path, "-c", "100"}), {"the context holds 256 (100, rounded up"});
  const std::string longer = temporary_file("longer.txt", cli_text(60000));
  expect_refused(run_with({"-f", longer}), {"8192", "trained"});
}

TEST(Hostile, NumbersOutsideTheirRange) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> flags = {
      {"-n", {"0", "-1", "99999999999999999999", "abc", "", "1.5", "1e3"}},
      {"-c", {"0", "-1", "99999999999999999999", "abc"}},
      {"--ubatch", {"0", "63", "-2048", "16385", "99999999999999999999", "x"}},
      {"-t", {"0", "-1", "513", "99999999999999999999", "two"}},
      {"--temp", {"-0.1", "101", "nan", "inf", "warm", "1e999"}},
      {"--top-k", {"-1", "99999999999999999999", "k"}},
      {"--top-p", {"-0.01", "1.01", "nan"}},
      {"--seed", {"-1", "4294967296", "abc"}}};
  for (const auto& [flag, values] : flags) {
    for (const std::string& value : values) {
      SCOPED_TRACE(flag + " " + value);
      expect_refused(run_with({"-p", "Hello", flag + (flag[1] == '-' ? "=" : "") + value}),
                     value.empty() ? std::vector<std::string>{} : std::vector<std::string>{value});
    }
  }
  // The legal range stands in the line.
  expect_refused(run_with({"-p", "Hello", "--ubatch", "63"}), {"64 to 16384"});
}

TEST(Hostile, WordsOutsideTheirList) {
  expect_refused(run_with({"-p", "Hello", "--attn", "no_such_method"}),
                 {"no_such_method", "vertical_slash", "stock"});
  expect_refused(run_with({"-p", "Hello", "--precision", "fp8"}), {"fp8", "bf16"});
  expect_refused(run_with({"-p", "Hello", "--guard", "maybe"}), {"maybe", "report"});
  expect_refused(run_with({"-p", "Hello", "--no-such-flag"}), {"--no-such-flag"});
  expect_refused(run_cli({"no_such_command"}), {"no_such_command"});
  expect_refused(run_cli({}), {});
  expect_refused(run_cli({"run"}), {"--model"});
  expect_refused(run_cli({"list", "--", "-x"}), {"serve"});
}

TEST(Hostile, VariableOfTheWrongKind) {
  expect_refused(
      run_with({"-p", "Hello"}, {.environment = {{"MINFERENCE_ATTN", "no_such_method"}}}),
      {"no_such_method", "vertical_slash"});
  expect_refused(run_with({"-p", "Hello"}, {.environment = {{"MINFERENCE_FORCE_ISA", "sse9"}}}),
                 {"sse9", "generic"});
}

TEST(Hostile, MethodOptions) {
  const auto with = [](const std::string& option) {
    return run_with({"-p", "Hello", "--attn", "vertical_slash", "--attn-opt", option});
  };
  expect_refused(with("nonsense"), {"nonsense"});
  expect_refused(with("vertical_size=many"), {"vertical_size=many"});
  expect_refused(with("vertical_size=-1"), {"vertical_size", "-1"});
  expect_refused(with("vertical_size=nan"), {"vertical_size=nan"});
  expect_refused(with("no_such_option=1"), {"no_such_option", "slash_size"});
  expect_refused(run_with({"-p", "Hello", "--attn", "stock", "--attn-opt", "a=1"}), {"stock"});
}

TEST(Hostile, Segments) {
  const auto with = [](const std::string& segments) {
    return run_with({"-p", "One two three four five six", "--no-chat", "--attn", "mminference",
                     "--segments", segments});
  };
  for (const char* text : {"", "1:2", "1:2:visual:3:4", "a:2:visual", "1::visual", "1:2:picture",
                           "1:2:visual:x", "1.5:2:visual"}) {
    SCOPED_TRACE(text);
    expect_refused(with(text), {"begin:end:"});
  }
  expect_refused(with("2:4:visual,3:5:visual"), {"segment 1", "[3, 5)", "4", "without overlap"});
  expect_refused(with("3:5:visual,1:2:visual"), {"segment 1", "[1, 2)", "ascending"});
  expect_refused(with("3:3:visual"), {"segment 0", "[3, 3)", "begin < end"});
  expect_refused(with("-1:3:visual"), {"[-1, 3)", "0 <= begin"});
  expect_refused(with("1:100000:visual"), {"[1, 100000)", "tokens of the prompt"});
  expect_refused(with("1:3:visual:9"), {"stride of 9", "length, 2"});
  for (const char* method : {"vertical_slash", "stock"}) {
    expect_refused(run_with({"-p", "Hello", "--attn", method, "--segments", "0:1:visual"}),
                   {"mminference", method});
  }
}

TEST(Hostile, PatternFiles) {
  const auto with = [](const std::string& path) {
    return run_with({"-p", "Hello", "--pattern", path});
  };
  expect_refused(with("/no/such/pattern.json"), {"/no/such/pattern.json"});
  expect_refused(with("nope"), {"'nope'", "a file", "smollm2-135m-instruct"});
  expect_refused(with("/tmp"), {"/tmp"});
  for (const char* content :
       {"", "{", "[1, 2]", "{\"0\": []}", "[{\"0\": [\"no_such_type\", 1, 2, 3]}]",
        "[{\"zero\": [\"stream_llm\", 1, 2, 3]}]", "[{\"0\": [\"stream_llm\", -1, 2, 3]}]"}) {
    const std::string path = temporary_file("pattern.json", content);
    SCOPED_TRACE(content);
    expect_refused(with(path), {path});
  }
  // One layer of two heads for a model of 30 layers of nine: both sides are named.
  const std::string path = temporary_file(
      "small.json", R"([{"0": ["stream_llm", 1, 2, 0.5], "1": ["stream_llm", 1, 2, 0.5]}])");
  expect_refused(with(path), {path, "30", "1 layer"});
  expect_refused(run_with({"-p", "Hello", "--attn", "dense", "--pattern", path}),
                 {"minference", "dense"});
}

TEST(Hostile, ContextThatTheMemoryCannotHold) {
  expect_refused(run_with({"-p", "Hello", "-c", "16777216"}), {"16777216", "MiB"});
}

TEST(Hostile, StandardOutputThatCannotBeWritten) {
  const ProcessResult result = run_cli({"list"}, {.output_path = "/dev/full"});
  expect_refused(result, {"standard output", "No space left"});
}

TEST(Hostile, ServeChecksBeforeItStarts) {
  expect_refused(run_cli({"serve", "-m", "/no/such/model.gguf"}), {"no such file"});
  expect_refused(run_cli({"serve", "-m", cli_model(), "--attn", "no_such_method"}),
                 {"no_such_method", "vertical_slash"});
  expect_refused(run_cli({"serve", "-m", cli_model(), "--attn-opt", "no_such_option=1"}),
                 {"no_such_option"});
  expect_refused(run_cli({"serve", "-m", cli_model(), "--ubatch", "0"}), {"64 to 16384"});
}

ProcessResult bench_with(std::vector<std::string> arguments, const ProcessOptions& options = {}) {
  arguments.insert(arguments.begin(), {"bench", "-m", cli_model()});
  return run_cli(arguments, options);
}

TEST(Hostile, BenchLengths) {
  for (const char* length : {"0", "-1", "63", "k", "8kk", "1.5k", "abc", "99999999999999999999",
                             "9007199254740993k", "512,0"}) {
    SCOPED_TRACE(length);
    const std::string bad = length == std::string("512,0") ? "0" : length;
    expect_refused(bench_with({std::string("--tokens=") + length}),
                   {"--tokens", "'" + bad + "'", "64 to"});
  }
  expect_refused(bench_with({"-p", "512,16k"}), {"16384", "8192", "trained"});
  const std::string text = temporary_file("short.txt", cli_text(900));
  expect_refused(bench_with({"-p", "4k", "--prompt-file", text}), {text, "4096", "tokens"});
  expect_refused(run_cli({"bench", "--attention", "-p", "63"}), {"'63'", "64 to 4194304"});
  expect_refused(run_cli({"bench", "--linear", "-p", "65537"}), {"65537", "1 to 65536"});
}

TEST(Hostile, BenchMethods) {
  expect_refused(bench_with({"--attn", "dense,no_such_method"}),
                 {"no_such_method", "vertical_slash", "stock"});
  expect_refused(bench_with({"--attn", ":a=1"}), {"unknown method ''"});
  expect_refused(bench_with({"--attn", "stock:a=1"}), {"stock:a=1", "no options"});
  expect_refused(bench_with({"--attn", "vertical_slash:no_such=1"}), {"no_such", "slash_size"});
  expect_refused(bench_with({"--attn", "vertical_slash:slash_size"}), {"slash_size", "key=number"});
  expect_refused(bench_with({"--attn", "dense", "--pattern", "/no/such.json"}),
                 {"/no/such.json", "minference"});
  expect_refused(bench_with({"--pattern", "/no/such.json"}), {"/no/such.json"});
  // Only the model's own process finds that the file is for another model; it ends the bench.
  const std::string path = temporary_file("other.json", R"([{"0": ["stream_llm", 1, 2, 0.5]}])");
  expect_refused(bench_with({"-p", "64", "--attn", "minference", "--pattern", path}),
                 {path, "30", "1 layer"});
}

TEST(Hostile, BenchFiles) {
  expect_refused(run_cli({"bench", "-m", "/no/such/model.gguf"}), {"/no/such/model.gguf"});
  const std::string model = temporary_file("words.gguf", "This is no model.");
  expect_refused(run_cli({"bench", "-m", model}), {model, "not a GGUF file"});
  std::ifstream file(cli_model(), std::ios::binary);
  std::string bytes(20'000'000, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const std::string truncated = temporary_file("truncated.gguf", bytes);
  expect_refused(run_cli({"bench", "-m", truncated}), {truncated, "corrupted or incomplete"});
  expect_refused(bench_with({"--prompt-file", "/no/such.txt"}), {"/no/such.txt", "No such file"});
  const std::string empty = temporary_file("nothing.txt", "");
  expect_refused(bench_with({"--prompt-file", empty}), {empty, "empty"});
  const std::string binary = temporary_file("binary.txt", "ab\xFF");
  expect_refused(bench_with({"--prompt-file", binary}), {binary, "UTF-8"});
  expect_refused(bench_with({"-o", "/no/such/folder/x.json"}), {"/no/such/folder/x.json"});
}

TEST(Hostile, BenchOptionsOfTheWrongTable) {
  expect_refused(run_cli({"bench"}), {"--attention", "--linear", "-m"});
  expect_refused(run_cli({"bench", "--attention", "--linear"}), {"--attention", "--linear"});
  expect_refused(bench_with({"--attention"}), {"--attention", "--model"});
  expect_refused(bench_with({"--rows", "64"}), {"--rows", "--linear"});
  expect_refused(bench_with({"--kept", "10"}), {"--kept", "--attention"});
  expect_refused(bench_with({"--isa", "generic"}), {"--isa", "--model"});
  expect_refused(run_cli({"bench", "--linear", "--attn", "dense"}), {"--attn", "--model"});
}

TEST(Hostile, BenchNumbersOutsideTheirRange) {
  const std::vector<std::vector<std::string>> cases = {
      {"-t", "0"}, {"-t", "513"}, {"-r", "0"}, {"-r", "1001"}, {"-n", "0"}, {"--ubatch", "63"}};
  for (const std::vector<std::string>& arguments : cases) {
    SCOPED_TRACE(arguments[0]);
    expect_refused(bench_with(arguments), {"'" + arguments[1] + "'", " to "});
  }
  const auto kernel = [](const char* table, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"bench", table, "-r", "1"});
    return run_cli(arguments);
  };
  expect_refused(kernel("--attention", {"--kept", "0"}), {"--kept", "0.1"});
  expect_refused(kernel("--attention", {"--head-dim", "257"}), {"257", "256"});
  expect_refused(kernel("--attention", {"--heads", "3", "--kv-heads", "2"}), {"3", "2"});
  expect_refused(kernel("--attention", {"--isa", "no_such_level"}), {"no_such_level", "generic"});
  expect_refused(kernel("--attention", {"--attn-opt", "no_such=1"}), {"no_such", "slash_size"});
  expect_refused(kernel("--linear", {"--cols", "300"}), {"300", "256"});
  expect_refused(kernel("--linear", {"--type", "q9_9"}), {"q9_9", "q4_K"});
}

// A copy of the command line in a folder of its own: the files that belong beside it are missing.
TEST(Hostile, MissingCompanions) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(temporary_file("marker", "")).parent_path() / "alone";
  fs::create_directories(folder);
  const fs::path program = folder / "minference";
  fs::copy_file(MINFERENCE_TEST_BIN_DIR "/minference", program,
                fs::copy_options::overwrite_existing);
  const auto alone = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program.string());
    return run_process(arguments, {.environment = {{"LD_LIBRARY_PATH", MINFERENCE_TEST_BIN_DIR}}});
  };
  expect_refused(alone({"serve", "-m", cli_model()}), {"llama-server", "make tools"});
  const ProcessResult cpu = alone({"run", "-m", cli_model(), "-p", "Hello"});
  EXPECT_EQ(cpu.exit_code, 1);
  EXPECT_NE(cpu.err.find("libggml-cpu.so"), std::string::npos) << cpu.err;
  fs::create_symlink(MINFERENCE_TEST_BIN_DIR "/libggml-cpu.so", folder / "libggml-cpu.so");
  expect_refused(alone({"run", "-m", cli_model(), "-p", "Hello"}),
                 {"libggml-minference.so", "missing"});
  const ProcessResult doctor = alone({"doctor"});
  EXPECT_EQ(doctor.exit_code, 1);
  EXPECT_NE(doctor.out.find("NO: "), std::string::npos) << doctor.out;
}

TEST(Hostile, ModelWhoseNameIsNoText) {
  const std::string model = temporary_file("bad\xff.gguf", "");
  std::filesystem::remove(model);
  std::filesystem::create_symlink(cli_model(), model);
  const ProcessResult result = run_cli({"run", "-m", model, "-p", "Hello", "-n", "1", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("bad\xEF\xBF\xBD.gguf"), std::string::npos) << result.out;
}

}  // namespace
}  // namespace minference::testing
