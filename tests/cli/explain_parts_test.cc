// The parts of `explain` that need no model: colours, pictures, HTML, lists of heads, the folder.
#include <gtest/gtest.h>

#include <png.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "cli/png.h"
#include "cli/report_folder.h"
#include "explain/figures.h"
#include "explain/html_text.h"
#include "explain/picture.h"
#include "minference/error.h"
#include "support/process.h"

namespace minference::cli {
namespace {

namespace fs = std::filesystem;
using explain::check_heads;
using explain::Colour;
using explain::ColourMap;
using explain::enlarge;
using explain::fill_template;
using explain::HeadId;
using explain::html_escape;
using explain::kMaxShownHeads;
using explain::log_position;
using explain::parse_heads;
using explain::Picture;
using explain::png_data_uri;
using minference::testing::temporary_file;

TEST(ColourMap, RunsThroughItsStops) {
  const ColourMap map{{0, 0, 0}, {100, 200, 0}, {100, 200, 250}};
  EXPECT_EQ(map.at(0), (Colour{0, 0, 0}));
  EXPECT_EQ(map.at(0.25), (Colour{50, 100, 0}));
  EXPECT_EQ(map.at(0.5), (Colour{100, 200, 0}));
  EXPECT_EQ(map.at(0.75), (Colour{100, 200, 125}));
  EXPECT_EQ(map.at(1), (Colour{100, 200, 250}));
  EXPECT_EQ(map.at(-3), map.at(0));
  EXPECT_EQ(map.at(7), map.at(1));
  EXPECT_EQ(map.at(NAN), map.at(0));
  EXPECT_EQ(map.css_gradient(), "linear-gradient(to right, #000000, #64c800, #64c8fa)");
  EXPECT_EQ(ColourMap({{1, 2, 3}}).at(0.7), (Colour{1, 2, 3}));
}

TEST(LogPosition, IsEvenPerFactor) {
  EXPECT_EQ(log_position(0, 0.001, 1), 0);
  EXPECT_EQ(log_position(NAN, 0.001, 1), 0);
  EXPECT_EQ(log_position(0.001, 0.001, 1), 0);
  EXPECT_NEAR(log_position(0.01, 0.001, 1), 1.0 / 3, 1e-12);
  EXPECT_NEAR(log_position(0.1, 0.001, 1), 2.0 / 3, 1e-12);
  EXPECT_EQ(log_position(1, 0.001, 1), 1);
  EXPECT_EQ(log_position(5, 0.001, 1), 1);
}

TEST(Picture, EnlargesEveryPixel) {
  const Picture picture = enlarge({2, 1, {{}, {9, 9, 9}}, {0, 1}}, 2);
  EXPECT_EQ(picture.width, 4);
  EXPECT_EQ(picture.height, 2);
  EXPECT_EQ(picture.pixels, (std::vector<std::uint8_t>{0, 0, 1, 1, 0, 0, 1, 1}));
}

TEST(Picture, PngComesBackAsItWas) {
  const Picture picture{3, 2, {{255, 0, 0}, {0, 255, 0}, {1, 2, 3}}, {0, 1, 2, 2, 1, 0}};
  const std::string bytes = encode_png(picture);
  EXPECT_EQ(bytes.substr(0, 8), "\x89PNG\r\n\x1A\n");
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  ASSERT_NE(png_image_begin_read_from_memory(&image, bytes.data(), bytes.size()), 0);
  EXPECT_EQ(image.width, 3U);
  EXPECT_EQ(image.height, 2U);
  image.format = PNG_FORMAT_RGB;
  std::vector<std::uint8_t> pixels(PNG_IMAGE_SIZE(image));
  ASSERT_NE(png_image_finish_read(&image, nullptr, pixels.data(), 0, nullptr), 0);
  for (std::size_t i = 0; i < picture.pixels.size(); ++i) {
    const Colour& colour = picture.palette[picture.pixels[i]];
    EXPECT_EQ((Colour{pixels[3 * i], pixels[3 * i + 1], pixels[3 * i + 2]}), colour) << i;
  }
}

TEST(Picture, RefusesWhatIsNone) {
  EXPECT_THROW(encode_png({}), InvalidArgument);
  EXPECT_THROW(encode_png({2, 2, {{}}, {0, 0, 0}}), InvalidArgument);
  EXPECT_THROW(encode_png({1, 1, {{}}, {1}}), InvalidArgument);
  EXPECT_THROW(encode_png({1, 1, {}, {0}}), InvalidArgument);
  EXPECT_THROW(encode_png({-1, -1, {{}}, {0}}), InvalidArgument);
  EXPECT_THROW(encode_png({1, 1, std::vector<Colour>(257), {0}}), InvalidArgument);
}

TEST(HtmlText, Escapes) {
  EXPECT_EQ(html_escape("a<b>&\"c'.gguf"), "a&lt;b&gt;&amp;&quot;c&#39;.gguf");
  EXPECT_EQ(html_escape(""), "");
}

TEST(HtmlText, DataUris) {
  const std::string prefix = "data:image/png;base64,";
  EXPECT_EQ(png_data_uri(""), prefix);
  EXPECT_EQ(png_data_uri("f"), prefix + "Zg==");
  EXPECT_EQ(png_data_uri("fo"), prefix + "Zm8=");
  EXPECT_EQ(png_data_uri("foo"), prefix + "Zm9v");
  EXPECT_EQ(png_data_uri("\xFF\xFE\xFD\xFC"), prefix + "//79/A==");
}

TEST(HtmlText, TemplatesAreFilledOnce) {
  EXPECT_EQ(fill_template("<@a@>@media@b@ x@", {{"a", "@b@"}, {"b", "2"}}), "<@b@>@media2 x@");
}

TEST(Heads, AreParsed) {
  EXPECT_EQ(parse_heads("3:5"), (std::vector<HeadId>{{3, 5}}));
  EXPECT_EQ(parse_heads("3:5,0:12"), (std::vector<HeadId>{{3, 5}, {0, 12}}));
  for (const char* text : {"", "3", "3:", ":5", "3:5,", ",3:5", "a:b", "-1:2", "1:-2", "1:2:3",
                           "1;2", "99999999999999999999:1", "3:5,3:5"}) {
    EXPECT_THROW(parse_heads(text), InvalidArgument) << text;
  }
  std::string many = "0:0";
  for (std::int64_t head = 1; head < kMaxShownHeads; ++head) many += ",0:" + std::to_string(head);
  EXPECT_EQ(static_cast<std::int64_t>(parse_heads(many).size()), kMaxShownHeads);
  EXPECT_THROW(parse_heads(many + ",1:0"), InvalidArgument);
  EXPECT_NO_THROW(check_heads({{29, 8}}, 30, 9));
  EXPECT_THROW(check_heads({{30, 0}}, 30, 9), InvalidArgument);
  EXPECT_THROW(check_heads({{0, 9}}, 30, 9), InvalidArgument);
}

class ReportFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::path(temporary_file("marker", "")).parent_path() / "folders";
    fs::remove_all(base_);
    fs::create_directory(base_);
  }
  void TearDown() override { fs::remove_all(base_); }

  std::string path(const std::string& name) const { return (base_ / name).string(); }
  std::vector<std::string> files(const fs::path& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string content(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static bool nothing(const std::string&) { return false; }

  fs::path base_;
};

TEST_F(ReportFolderTest, AppearsWhenItIsPublished) {
  {
    ReportFolder folder(path("new/"), false);
    folder.write("a.txt", "one");
    EXPECT_FALSE(fs::exists(path("new")));
    folder.publish(nothing);
  }
  EXPECT_EQ(files(base_), std::vector<std::string>{"new"});
  EXPECT_EQ(content(path("new/a.txt")), "one");
}

TEST_F(ReportFolderTest, LeavesNothingOtherwise) {
  fs::create_directory(path("empty"));
  for (const char* name : {"new", "empty"}) {
    ReportFolder folder(path(name), false);
    folder.write("a.txt", "one");
  }
  EXPECT_EQ(files(base_), std::vector<std::string>{"empty"});
  EXPECT_TRUE(fs::is_empty(path("empty")));
}

TEST_F(ReportFolderTest, SparesWhatIsThere) {
  fs::create_directory(path("full"));
  std::ofstream(path("full/mine.txt")) << "mine";
  std::ofstream(path("full/a.txt")) << "old";
  std::ofstream(path("full/stale.png")) << "old";
  EXPECT_THROW(ReportFolder(path("full"), false), InvalidArgument);
  ReportFolder folder(path("full"), true);
  folder.write("a.txt", "new");
  folder.publish([](const std::string& name) { return name == "stale.png" || name == "a.txt"; });
  EXPECT_EQ(content(path("full/mine.txt")), "mine");
  EXPECT_EQ(content(path("full/a.txt")), "new");
  EXPECT_FALSE(fs::exists(path("full/stale.png")));
}

TEST_F(ReportFolderTest, RefusesWhatIsNoPlace) {
  std::ofstream(path("file")) << "x";
  EXPECT_THROW(ReportFolder("", false), InvalidArgument);
  EXPECT_THROW(ReportFolder(path("file"), true), IoError);
  EXPECT_THROW(ReportFolder(path("file/report"), false), IoError);
  EXPECT_THROW(ReportFolder(path("no/such/parent"), false), IoError);
  EXPECT_EQ(files(base_), std::vector<std::string>{"file"});
}

}  // namespace
}  // namespace minference::cli
