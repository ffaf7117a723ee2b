// UTF-8: invalid bytes are found where they are, streams are cut only between characters.
#include "llama/text.h"

#include <gtest/gtest.h>

#include <string>

#include "llama/ggml_guard.h"

namespace minference::llama_host {
namespace {

TEST(Utf8, FindsTheFirstInvalidByte) {
  EXPECT_FALSE(find_invalid_utf8(""));
  EXPECT_FALSE(find_invalid_utf8("plain"));
  EXPECT_FALSE(find_invalid_utf8("gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80"));
  EXPECT_EQ(find_invalid_utf8("ab\xFFzz"), 2U);
  EXPECT_EQ(find_invalid_utf8("ab\xC3"), 2U);             // cut short
  EXPECT_EQ(find_invalid_utf8("\xC0\xAF"), 0U);           // overlong
  EXPECT_EQ(find_invalid_utf8("x\xE0\x80\x80"), 1U);      // overlong
  EXPECT_EQ(find_invalid_utf8("x\xED\xA0\x80"), 1U);      // surrogate
  EXPECT_EQ(find_invalid_utf8("x\xF4\x90\x80\x80"), 1U);  // beyond U+10FFFF
  EXPECT_EQ(find_invalid_utf8("\x80"), 0U);               // continuation without a lead
  EXPECT_FALSE(find_invalid_utf8(std::string_view("a\0b", 3)));
}

TEST(Utf8, StreamKeepsCharactersWhole) {
  const std::string text = "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80!";
  for (std::size_t step = 1; step <= 5; ++step) {
    Utf8Stream stream;
    std::string joined;
    for (std::size_t i = 0; i < text.size(); i += step) {
      const std::string piece = stream.push(text.substr(i, step));
      EXPECT_FALSE(find_invalid_utf8(piece));
      joined += piece;
    }
    EXPECT_EQ(joined + stream.finish(), text);
  }
}

TEST(Utf8, StreamReplacesWhatIsInvalid) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xFF"
                        "b"),
            "a\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(stream.push("\xE2\x82"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(GgmlGuard, OnlyTheSameVersionWillDo) {
  EXPECT_EQ(check_ggml_version("0.25.3", "0.25.3"), "");
  for (const char* other : {"0.25.4", "0.25.2", "0.25.30", "1.25.3", ""}) {
    const std::string message = check_ggml_version("0.25.3", other);
    EXPECT_NE(message.find("0.25.3"), std::string::npos);
    EXPECT_NE(message.find(other), std::string::npos);
  }
}

}  // namespace
}  // namespace minference::llama_host
