// Estimates that serve the chunks after their own (methods/shared_estimate.h).
#include <gtest/gtest.h>

#include <algorithm>

#include "minference/error.h"
#include "minference/method.h"
#include "support/estimated_heads.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// The heads of a chunk by a method that may remember earlier ones.
SparseIndex chunk_of(const char* method, const Problem& problem, MethodState* state,
                     const MethodOptions& options, std::int64_t begin, std::int64_t end) {
  MethodContext context;
  context.state = state;
  const Method& found = find_method(method);
  return found.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                           resolve_options(found, options), context);
}

TEST(SharedEstimate, ServesChunksUntilEnoughRowsHaveCome) {
  Case c = estimated();
  c.q_len = 9000;
  c.extra = 0;
  const Problem problem = make_problem(c);
  for (const char* method : {"vertical_slash", "minference"}) {
    SCOPED_TRACE(method);
    MethodOptions options{{"estimate_every", 1000}};
    if (method == std::string("vertical_slash")) {
      options.insert({{"vertical_size", 50}, {"slash_size", 110}});
    } else {
      options["minference_ratio"] = 0.02;
    }
    const auto alone = [&](std::int64_t begin, std::int64_t end) {
      return chunk_of(method, problem, nullptr, options, begin, end);
    };
    MethodState state;
    const auto next = [&](std::int64_t begin, std::int64_t end) {
      return chunk_of(method, problem, &state, options, begin, end);
    };
    const auto expect_same = [&](const SparseIndex& a, const SparseIndex& b) {
      for (std::size_t i = 0; i < a.heads.size(); ++i) expect_same_head(a.heads[i], b.heads[i]);
    };
    const SparseIndex first = next(0, 5000);
    expect_same(first, alone(0, 5000));
    expect_same(next(5000, 5500), first);
    expect_same(next(5500, 5999), first);
    const SparseIndex second = next(5999, 6000);  // 1000 rows later
    expect_same(second, alone(5999, 6000));
    EXPECT_EQ(state.kv_lens[0], 6000);
    expect_same(next(6000, 6900), second);
    // Rows that replace what was estimated are another prompt's.
    expect_same(next(5990, 6500), alone(5990, 6500));
    // A chunk as long as that is estimated every time.
    expect_same(next(6500, 7500), alone(6500, 7500));
    expect_same(next(7500, 8500), alone(7500, 8500));
  }
}

// A prompt's last rows hold its question: no estimate of earlier rows may stand for them.
TEST(SharedEstimate, TheLastChunkHasItsOwn) {
  Case c = estimated();
  c.q_len = 6000;
  c.extra = 0;
  const Problem problem = make_problem(c);
  const Method& method = find_method("vertical_slash");
  const MethodOptions options =
      resolve_options(method, {{"vertical_size", 50}, {"slash_size", 110}});
  MethodState state;
  MethodContext context;
  context.state = &state;
  const auto next = [&](std::int64_t begin, std::int64_t end, std::int64_t rows_after) {
    context.rows_after = {&rows_after, 1};
    return method.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                              options, context);
  };
  next(0, 5000, 1000);
  const SparseIndex shared = next(5000, 5500, 500);
  const SparseIndex last = next(5500, 6000, 0);
  const SparseIndex alone = chunk_of("vertical_slash", problem, nullptr, options, 5500, 6000);
  bool differ = false;
  for (std::size_t i = 0; i < last.heads.size(); ++i) {
    expect_same_head(last.heads[i], alone.heads[i]);
    differ = differ || last.heads[i].columns != shared.heads[i].columns;
  }
  EXPECT_TRUE(differ);
}

TEST(SharedEstimate, RefusesRowsAfterThatAreNotOneASequence) {
  Case c = estimated();
  c.batch = 2;
  const Problem problem = make_problem(c);
  const std::int64_t rows_after = 0;
  MethodContext context;
  context.rows_after = {&rows_after, 1};
  for (const char* name : {"vertical_slash", "minference", "flexprefill"}) {
    const Method& method = find_method(name);
    EXPECT_THROW(
        method.build_index(problem.input(), problem.params, resolve_options(method, {}), context),
        InvalidArgument)
        << name;
  }
}

// Heads that a budget covered when the others were estimated get their estimate when it no longer
// does.
TEST(SharedEstimate, ReachesHeadsThatWereDenseBefore) {
  Case c = estimated();
  c.q_len = 9000;
  c.extra = 0;
  const Problem problem = make_problem(c);
  const PatternFile patterns = PatternFile::parse(
      R"([{"0": ["vertical_and_slash", 40, 110, 1], "1": ["vertical_and_slash", 40, 5200, 1],
           "2": ["stream_llm", 40, 90, 1], "3": ["vertical_and_slash", 40, 120, 1]}])",
      "toy.json");
  MethodState state;
  MethodContext context;
  context.patterns = &patterns;
  context.state = &state;
  const Method& method = find_method("minference");
  const MethodOptions options = resolve_options(method, {});
  const auto chunk = [&](std::int64_t begin, std::int64_t end) {
    return method.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                              options, context);
  };
  chunk(0, 5000);
  EXPECT_EQ(state.index.head(0, 1).kind, HeadIndex::Kind::kDense);
  chunk(5000, 5300);
  EXPECT_EQ(state.index.head(0, 1).kind, HeadIndex::Kind::kDiagonal);
  EXPECT_EQ(state.kv_lens[0], 5300);
}

TEST(SharedEstimate, FlexPrefillKeepsItsBlocks) {
  Case c = estimated();
  c.q_len = 4096;
  c.extra = 0;
  const Problem problem = make_problem(c);
  for (const double tau : {0.0, 1.0}) {
    const MethodOptions options{{"gamma", 0.5}, {"tau", tau}};
    MethodState state;
    chunk_of("flexprefill", problem, &state, options, 0, 2048);
    const HeadIndex first = state.index.head(0, 0);
    EXPECT_EQ(first.kind, tau == 0 ? HeadIndex::Kind::kDiagonal : HeadIndex::Kind::kBlock);
    const SparseIndex shared = chunk_of("flexprefill", problem, &state, options, 2048, 2500);
    EXPECT_EQ(state.index.head(0, 0).columns, first.columns);
    // Row block 0 has the columns, in index blocks of half their size.
    for (const std::int64_t n : first.columns) {
      const HeadIndex& head = shared.head(0, 0);
      const auto end = head.block_ids.begin() + head.block_begin[1];
      EXPECT_TRUE(std::find(head.block_ids.begin(), end, 2 * n) != end) << n;
    }
    chunk_of("flexprefill", problem, &state, options, 2500, 2600);
    EXPECT_EQ(state.kv_lens[0], 2600);  // more than a quarter of 2048 rows later
    const SparseIndex alone = chunk_of("flexprefill", problem, nullptr, options, 3072, 4096);
    MethodState fresh;
    const SparseIndex again = chunk_of("flexprefill", problem, &fresh, options, 3072, 4096);
    EXPECT_EQ(alone.head(0, 1).block_ids, again.head(0, 1).block_ids);
  }
}

}  // namespace
}  // namespace minference::test
