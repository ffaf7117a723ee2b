#include "core/format_number.h"

#include <gtest/gtest.h>

#include <limits>
#include <locale>
#include <string>

namespace minference::test {
namespace {

TEST(FormatNumber, IsTheShortestThatReadsBack) {
  EXPECT_EQ(format_number(64), "64");
  EXPECT_EQ(format_number(0.5), "0.5");
  EXPECT_EQ(format_number(1000001), "1000001");
  EXPECT_EQ(format_number(-3), "-3");
  EXPECT_EQ(format_number(1.0000001), "1.0000001");
  EXPECT_EQ(format_number(1e-7), "1e-07");
  EXPECT_EQ(format_number(1e300), "1e+300");
  EXPECT_EQ(format_number(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(format_number(std::numeric_limits<double>::quiet_NaN()), "nan");
}

// A program's locale may write 0,5.
TEST(FormatNumber, FollowsNoLocale) {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  const std::string text = format_number(0.5);
  std::locale::global(before);
  EXPECT_EQ(text, "0.5");
}

}  // namespace
}  // namespace minference::test
