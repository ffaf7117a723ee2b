#include "minference/pattern.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "minference/error.h"

namespace minference {
namespace {

using Kind = HeadPattern::Kind;

constexpr const char* kGood = R"([
  {"0": ["vertical_and_slash", 30, 800, 0.95], "1": ["stream_llm", 100, 750, 1]},
  {"1": ["block_sparse", 0, 2147483648, 123456]},
  {}
])";

TEST(PatternFile, ReadsEveryField) {
  const PatternFile file = PatternFile::parse(kGood, "good.json");
  EXPECT_EQ(file.layers(), 3);
  EXPECT_EQ(file.heads(), 2);
  EXPECT_EQ(file.name(), "good.json");
  const HeadPattern first = file.at(0, 0);
  EXPECT_EQ(first.kind, Kind::kVerticalSlash);
  EXPECT_EQ(first.vertical, 30);
  EXPECT_EQ(first.slash, 800);
  EXPECT_EQ(first.score, 0.95);
  EXPECT_EQ(file.at(0, 1).kind, Kind::kAShape);
  EXPECT_EQ(file.at(1, 1).kind, Kind::kBlockSparse);
  EXPECT_EQ(file.at(1, 1).slash, std::int64_t{1} << 31);
}

TEST(PatternFile, HeadsLeftOutHaveTheDefault) {
  const PatternFile file = PatternFile::parse(kGood, "good.json");
  for (const auto& [layer, head] : {std::pair{1, 0}, {2, 1}, {0, 99}, {99, 0}, {-1, 0}, {0, -1}}) {
    const HeadPattern pattern = file.at(layer, head);
    EXPECT_EQ(pattern.kind, Kind::kVerticalSlash);
    EXPECT_EQ(pattern.vertical, 1000);
    EXPECT_EQ(pattern.slash, 6096);
  }
}

// Expects that the text is refused with a message that names the file and contains `words`.
void expect_refused(const std::string& text, const std::string& words) {
  try {
    PatternFile::parse(text, "bad.json");
    FAIL() << "not refused: " << text.substr(0, 100);
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("bad.json"), std::string::npos) << what;
    EXPECT_NE(what.find(words), std::string::npos) << what;
    EXPECT_LT(what.size(), 400U);
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
  }
}

// A file of one layer with one head whose value is `value`.
std::string one_head(const std::string& value) { return R"([{"0": )" + value + "}]"; }

TEST(PatternFile, RefusesWhatIsNotJson) {
  expect_refused("", "not valid JSON");
  expect_refused("[", "not valid JSON");
  expect_refused(one_head(R"(["stream_llm", 1, 2, 3)"), "not valid JSON");
  expect_refused(std::string(kGood) + "x", "not valid JSON");
  expect_refused(one_head(R"(["stream_llm", 1, 2, NaN])"), "not valid JSON");
  expect_refused(one_head(R"(["stream_llm", 1, 2, 1e999])"), "not valid JSON");
  expect_refused(std::string("[{\"0\": [\"\xFF\xFE\", 1, 2, 3]}]"), "not valid JSON");
  expect_refused(std::string(kGood).insert(3, 1, '\0'), "not valid JSON");
  expect_refused("[{\"" + std::string(1000000, 'a'), "not valid JSON");
}

TEST(PatternFile, RefusesAnotherStructure) {
  expect_refused("[]", "legal: an array with one object per layer");
  expect_refused("{}", "legal: an array with one object per layer");
  expect_refused("null", "legal: an array with one object per layer");
  expect_refused("42", "the content is 42");
  expect_refused("[[]]", "layer 0 is []");
  expect_refused("[{}, 3]", "layer 1 is 3");
  expect_refused(one_head("{}"), "nested deeper");
  expect_refused(one_head("[[1]]"), "nested deeper");
  expect_refused(std::string(1000000, '['), "nested deeper");
  expect_refused(R"([{"a":{"a":{"a":1}}}])", "nested deeper");
}

TEST(PatternFile, RefusesHeadNumbers) {
  for (const char* key :
       {"", "-1", "+1", "01", "1.0", "1 ", "x", "0x1", "1048577", "99999999999999999999"}) {
    expect_refused(R"([{}, {")" + std::string(key) + R"(": ["stream_llm", 1, 2, 3]}])",
                   "layer 1 has head \"" + std::string(key) + "\"");
  }
}

TEST(PatternFile, RefusesARepeatedHead) {
  expect_refused(R"([{"2": ["stream_llm", 1, 2, 3], "2": ["stream_llm", 1, 2, 3]}])",
                 "layer 0 has head \"2\" twice");
  // The same head in two layers is no repetition.
  EXPECT_NO_THROW(PatternFile::parse(
      R"([{"2": ["stream_llm", 1, 2, 3]}, {"2": ["stream_llm", 1, 2, 3]}])", "x"));
}

TEST(PatternFile, RefusesValues) {
  const std::string where = "layer 0, head 0: ";
  expect_refused(one_head("7"), where + "the value is 7");
  expect_refused(one_head("[]"), where + "the value is []");
  expect_refused(one_head(R"(["stream_llm", 1, 2])"), "legal: [type, vertical, slash, score]");
  expect_refused(one_head(R"(["stream_llm", 1, 2, 3, 4])"),
                 "legal: [type, vertical, slash, score]");
  expect_refused(one_head(R"(["tri_shape", 1, 2, 3])"),
                 "the type is \"tri_shape\"; legal: vertical_and_slash, stream_llm, block_sparse");
  expect_refused(one_head("[1, 1, 2, 3]"), where + "the type is 1");
  expect_refused(one_head(R"(["stream_llm", -1, 2, 3])"), where + "vertical is -1");
  expect_refused(one_head(R"(["stream_llm", 1.5, 2, 3])"), where + "vertical is 1.5");
  expect_refused(one_head(R"(["stream_llm", "1", 2, 3])"), where + "vertical is \"1\"");
  expect_refused(one_head(R"(["stream_llm", null, 2, 3])"), where + "vertical is null");
  expect_refused(one_head(R"(["stream_llm", 1, 2147483649, 3])"), where + "slash is 2147483649");
  expect_refused(one_head(R"(["stream_llm", 1, 18446744073709551615, 3])"),
                 "legal: a whole number from 0 to 2147483648");
  expect_refused(one_head(R"(["stream_llm", 1, 99999999999999999999999, 3])"), where + "slash");
  expect_refused(one_head(R"(["stream_llm", 1, 2, "3"])"), where + "the score is \"3\"");
  expect_refused(one_head(R"(["stream_llm", 1, 2, null])"), where + "the score is null");
}

TEST(PatternFile, ChecksTheModel) {
  const PatternFile file = PatternFile::parse(kGood, "good.json");
  EXPECT_NO_THROW(file.check_model(3, 2, "toy"));
  for (const auto& [layers, heads] : {std::pair{2, 2}, {4, 2}, {3, 1}, {3, 4}}) {
    try {
      file.check_model(layers, heads, "toy");
      FAIL() << layers << " layers of " << heads << " heads";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.what(), "pattern file good.json is for 3 layers of 2 heads; model toy has " +
                                  std::to_string(layers) + " layers of " + std::to_string(heads));
    }
  }
  // Without any head it is all defaults, for any number of heads.
  EXPECT_NO_THROW(PatternFile::parse("[{}, {}]", "empty.json").check_model(2, 32, "toy"));
}

// As the reference system writes its files: shares of mass, and counts of elements.
TEST(PatternFile, AReferenceFileComesBackAsItWas) {
  const std::string text =
      R"([{"0": ["vertical_and_slash", 1000, 6096, 0.9336], "1": ["stream_llm", 100, 800, 1.0], )"
      R"("10": ["vertical_and_slash", 30, 800, 0.0]}, {}, {"3": ["block_sparse", 1000, 6096, 123456], )"
      R"("4": ["vertical_and_slash", 3500, 100, 5.27e-05]}])";
  EXPECT_EQ(PatternFile::parse(text, "x").to_json(), text);
}

TEST(PatternFile, IsFilledHeadByHead) {
  PatternFile file(2);
  EXPECT_EQ(file.heads(), 0);
  file.set(1, 4, {Kind::kAShape, 64, 1024, 0.5});
  file.set(1, 4, {Kind::kAShape, 64, 2048, 0.75});
  EXPECT_EQ(file.layers(), 2);
  EXPECT_EQ(file.heads(), 5);
  EXPECT_EQ(file.at(1, 4).slash, 2048);
  EXPECT_EQ(file.to_json(), R"([{}, {"4": ["stream_llm", 64, 2048, 0.75]}])");
  EXPECT_THROW(file.set(2, 0, {}), InvalidArgument);
  EXPECT_THROW(file.set(-1, 0, {}), InvalidArgument);
  EXPECT_THROW(file.set(0, -1, {}), InvalidArgument);
  EXPECT_THROW(file.set(0, 0, {Kind::kAShape, -1, 1, 0}), InvalidArgument);
  EXPECT_THROW(file.set(0, 0, {Kind::kAShape, 1, (std::int64_t{1} << 31) + 1, 0}), InvalidArgument);
  EXPECT_THROW(file.set(0, 0, {Kind::kAShape, 1, 1, std::nan("")}), InvalidArgument);
}

class PatternPath : public testing::Test {
 protected:
  void SetUp() override {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_ = std::filesystem::path(testing::TempDir()) / ("pattern_" + name);
    std::filesystem::create_directories(folder_);
    path_ = folder_ / "pattern.json";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }

  std::filesystem::path folder_;
  std::filesystem::path path_;  // in a folder of its own
};

TEST_F(PatternPath, LoadsAFile) {
  write(kGood);
  const PatternFile file = PatternFile::load(path_);
  EXPECT_EQ(file.layers(), 3);
  EXPECT_EQ(file.name(), path_.string());
}

TEST_F(PatternPath, SavesAWholeFileOrNone) {
  const PatternFile file = PatternFile::parse(kGood, "good.json");
  file.save(path_);
  EXPECT_EQ(PatternFile::load(path_).to_json(), file.to_json());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
  const std::string missing = path_.string() + ".d/pattern.json";
  try {
    file.save(missing);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find(missing), std::string::npos) << error.what();
  }
  EXPECT_THROW(file.save("/dev/null"), IoError);
  EXPECT_THROW(file.save(testing::TempDir()), IoError);
}

TEST_F(PatternPath, ContentErrorsNameTheFile) {
  write("[1]");
  try {
    PatternFile::load(path_);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(path_.string()), std::string::npos);
  }
  write("");
  EXPECT_THROW(PatternFile::load(path_), InvalidArgument);
}

TEST_F(PatternPath, MissingFileAndFolderAreIoErrors) {
  try {
    PatternFile::load(path_);
    FAIL();
  } catch (const IoError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(path_.string()), std::string::npos) << what;
    EXPECT_NE(what.find("No such file"), std::string::npos) << what;
  }
  std::filesystem::create_directory(path_);
  try {
    PatternFile::load(path_);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("is a directory"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace minference
