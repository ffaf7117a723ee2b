#include "minference/segment.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "minference/error.h"
#include "minference/method.h"
#include "support/problem.h"

namespace minference {
namespace {

constexpr Modality kVisual = Modality::kVisual;

std::string refusal(const std::vector<Segment>& segments, std::int64_t tokens) {
  try {
    validate(segments, tokens);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Segments, OrderedOnesInsideThePromptAreLegal) {
  EXPECT_EQ(refusal({}, 0), "");
  EXPECT_EQ(refusal({{0, 10, kVisual}}, 10), "");
  EXPECT_EQ(refusal({{0, 1}, {1, 5, kVisual, 4}, {7, 9, kVisual, 2}, {9, 100}}, 100), "");
}

TEST(Segments, RefusalsNameTheSegmentItsValueAndWhatIsLegal) {
  for (const auto& [segments, expected] :
       {std::pair<std::vector<Segment>, const char*>{
            {{-1, 4}}, "segment 0 is [-1, 4); legal: 0 <= begin < end <= 100"},
        {{{4, 4}}, "segment 0 is [4, 4); legal"},
        {{{0, 4}, {9, 7}}, "segment 1 is [9, 7); legal"},
        {{{0, 101}}, "segment 0 is [0, 101); legal: 0 <= begin < end <= 100"},
        {{{0, 10}, {9, 20}}, "segment 1 is [9, 20) and begins before 10"},
        {{{50, 60}, {0, 10}}, "segment 1 is [0, 10) and begins before 60"},
        {{{0, 10, kVisual, 11}}, "with a stride of 11; legal: 0 (not known) to its length, 10"},
        {{{0, 10, kVisual, -1}}, "with a stride of -1; legal: 0 (not known) to its length, 10"},
        {{{0, 10, Modality::kText, 2}},
         "with a stride of 2; legal: 0 (not known), because it is text"},
        {{{0, 10, static_cast<Modality>(7)}}, "of modality 7; legal: text (0), visual (1)"}}) {
    const std::string what = refusal(segments, 100);
    EXPECT_NE(what.find(expected), std::string::npos) << what;
  }
}

// The message with which mminference refuses a context over the default problem.
std::string method_refusal(const MethodContext& context, const MethodOptions& options = {}) {
  const test::Problem problem = test::make_problem({});
  const Method& method = find_method("mminference");
  try {
    method.build_index(problem.input(), problem.params, resolve_options(method, options), context);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Segments, ThePromptEndsWithItsLastChunk) {
  const std::vector<Segment> segments = {{100, 200, kVisual}};  // of 128 keys so far
  const std::vector<std::span<const Segment>> spans = {segments};
  MethodContext context;
  context.segments = spans;
  EXPECT_NE(method_refusal(context).find("[100, 200); legal: 0 <= begin < end <= 128"),
            std::string::npos);
  const std::int64_t rows_after[] = {71};
  context.rows_after = rows_after;
  EXPECT_NE(method_refusal(context).find("end <= 199"), std::string::npos);
  const std::int64_t enough[] = {72};
  context.rows_after = enough;
  EXPECT_EQ(method_refusal(context), "");
}

TEST(Segments, OneListASequence) {
  const std::vector<std::span<const Segment>> spans(3);
  MethodContext context;
  context.segments = spans;
  EXPECT_NE(method_refusal(context).find("3 entries; legal: none, or one a sequence = 1"),
            std::string::npos);
}

TEST(Segments, StridesOfTheSearchMustNotContradictEachOther) {
  const std::string what = method_refusal({}, {{"min_stride", 100}, {"max_stride", 99}});
  EXPECT_NE(what.find("max_stride of method mminference is 99; legal: min_stride, 100"),
            std::string::npos)
      << what;
}

}  // namespace
}  // namespace minference
