// Methods whose kept keys follow from positions alone: the index against the rule, key by key.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention/reference/reference.h"
#include "minference/error.h"
#include "minference/method.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// Whether the row at `position` of a prompt of `length` tokens keeps `key`, a key that it may see.
using Rule = std::function<bool(std::int64_t position, std::int64_t key, std::int64_t length)>;

SparseIndex build(const char* method, const AttentionInput& input, const MethodOptions& options,
                  const MethodContext& context = {}) {
  const Method& found = find_method(method);
  SparseIndex index = found.build_index(input, {}, resolve_options(found, options), context);
  validate(index, input.q.batch(), input.q.heads(), input.q.tokens(), input.k.tokens());
  return index;
}

// Batches, ragged lengths, groups of 1 to 8, chunks of many rows and of one, lengths below and
// above the budgets of the cases below.
std::vector<Case> shapes() {
  std::vector<Case> result;
  const auto add = [&](const std::function<void(Case&)>& change) {
    Case c;
    c.q_len = 200;
    c.extra = 150;
    c.q_heads = 2;
    c.kv_heads = 1;
    c.dim = c.v_dim = 8;
    c.values = Values::kExact;
    change(c);
    result.push_back(c);
  };
  for (const auto& [rows, extra] : {std::pair{1, 0},
                                    {1, 9},
                                    {1, 400},
                                    {2, 400},
                                    {7, 0},
                                    {40, 3},
                                    {64, 64},
                                    {65, 300},
                                    {200, 0},
                                    {330, 0},
                                    {128, 257},
                                    {300, 200},
                                    {90, -30}}) {
    add([rows = rows, extra = extra](Case& c) {
      c.q_len = rows;
      c.extra = extra;
    });
  }
  for (std::int64_t group = 1; group <= 8; ++group) {
    add([=](Case& c) {
      c.batch = 2;
      c.kv_heads = group == 3 ? 2 : 1;
      c.q_heads = group * c.kv_heads;
    });
  }
  for (const Lengths lengths : {Lengths::kRagged, Lengths::kSomeEmpty}) {
    add([=](Case& c) {
      c.batch = 3;
      c.lengths = lengths;
    });
  }
  return result;
}

// Every (row, key) pair of every sequence and head, in the index and in attention over it: with
// zero queries a row's output is the mean of the values that it sees, and its LSE the log of their
// number. `rows_after` as in MethodContext.
void expect_rule(const SparseIndex& index, const AttentionInput& input, const Rule& rule,
                 std::int64_t rows_after = 0) {
  const Result result = make_result(input, DType::kF32, Layout::kPacked);
  attention(input, {}, result.output(), &index);
  const std::int64_t group = input.q.heads() / input.k.heads();
  for (std::int64_t b = 0; b < index.batch; ++b) {
    const std::int64_t q_len = query_length(input, b);
    const std::int64_t kv_len = key_length(input, b);
    for (std::int64_t h = 0; h < index.q_heads; ++h) {
      const std::vector<std::uint8_t> mask = explicit_mask(input, {}, b, h, &index);
      for (std::int64_t row = 0; row < q_len; ++row) {
        const std::int64_t position = kv_len - q_len + row;
        double count = 0;
        double sum = 0;
        for (std::int64_t key = 0; key < kv_len; ++key) {
          const bool expected = key <= position && rule(position, key, kv_len + rows_after);
          ASSERT_EQ(mask[row * kv_len + key] != 0, expected)
              << "sequence " << b << ", head " << h << ", row " << row << ", key " << key;
          if (!expected) continue;
          ++count;
          sum += *static_cast<const float*>(input.v.row(b, key, h / group));
        }
        if (count == 0) {
          ASSERT_EQ(result.lse.get(b, row, h, 0), -INFINITY);
          continue;
        }
        ASSERT_NEAR(result.lse.get(b, row, h, 0), std::log(count), 1e-5)
            << "sequence " << b << ", head " << h << ", row " << row;
        ASSERT_NEAR(result.out.get(b, row, h, 0), sum / count, 1e-5 * (1 + std::abs(sum / count)))
            << "sequence " << b << ", head " << h << ", row " << row;
      }
    }
  }
}

void expect_rule_on_every_shape(const char* method, const MethodOptions& options, const Rule& rule,
                                const MethodContext& context = {}) {
  for (const Case& c : shapes()) {
    std::string what = std::string(method) + ", " + describe(c);
    for (const auto& [name, value] : options) what += ", " + name + " " + std::to_string(value);
    SCOPED_TRACE(what);
    const Problem problem = make_problem(c);
    expect_rule(build(method, problem.input(), options, context), problem.input(), rule);
  }
}

MethodOptions triangle(std::int64_t n_init, std::int64_t n_local, std::int64_t n_last) {
  return {{"n_init", static_cast<double>(n_init)},
          {"n_local", static_cast<double>(n_local)},
          {"n_last", static_cast<double>(n_last)}};
}

Rule triangle_rule(std::int64_t n_init, std::int64_t n_local, std::int64_t n_last) {
  return [=](std::int64_t position, std::int64_t key, std::int64_t length) {
    return key < n_init || position - key < n_local || position >= length - n_last;
  };
}

TEST(AShape, KeepsItsRule) {
  for (const auto& [n_init, n_local] : {std::pair{5, 20}, {0, 1}, {64, 64}, {1, 300}, {300, 1}}) {
    expect_rule_on_every_shape(
        "a_shape",
        {{"n_init", static_cast<double>(n_init)}, {"n_local", static_cast<double>(n_local)}},
        triangle_rule(n_init, n_local, 0));
  }
}

TEST(TriShape, KeepsItsRule) {
  for (const auto& [n_init, n_local, n_last] :
       {std::tuple{5, 20, 10}, {0, 1, 1}, {3, 64, 64}, {16, 33, 100}, {8, 50, 1000}, {8, 50, 0}}) {
    expect_rule_on_every_shape("tri_shape", triangle(n_init, n_local, n_last),
                               triangle_rule(n_init, n_local, n_last));
  }
}

// The dense rows are those of the prompt, wherever chunks are cut, also where the last chunk has
// fewer rows than are to be dense.
TEST(TriShape, LastRowsAreThePromptsWhereTheCallerKnowsIt) {
  Case c;
  c.q_len = 300;
  c.extra = 0;
  c.dim = c.v_dim = 8;
  c.values = Values::kExact;
  const Problem problem = make_problem(c);
  for (const std::int64_t chunk : {1, 7, 64, 128, 299, 300}) {
    for (std::int64_t begin = 0; begin < c.q_len; begin += chunk) {
      SCOPED_TRACE("chunks of " + std::to_string(chunk) + ", from " + std::to_string(begin));
      const std::int64_t rows = std::min(chunk, c.q_len - begin);
      const AttentionInput part = part_of(problem.input(), 0, begin, rows, begin + rows);
      const std::int64_t rows_after[] = {c.q_len - begin - rows};
      MethodContext context;
      context.rows_after = rows_after;
      expect_rule(build("tri_shape", part, triangle(4, 30, 50), context), part,
                  triangle_rule(4, 30, 50), rows_after[0]);
      // Unknown: each chunk counts as the last one, so nothing of the above is missing.
      expect_rule(build("tri_shape", part, triangle(4, 30, 50)), part, triangle_rule(4, 30, 50));
    }
  }
}

TEST(TriShape, SequencesOfABatchEndWhereTheirsDo) {
  Case c;
  c.batch = 2;
  c.q_len = 100;
  c.extra = 40;
  c.dim = c.v_dim = 8;
  c.values = Values::kExact;
  const Problem problem = make_problem(c);
  const std::int64_t rows_after[] = {20, 500};
  MethodContext context;
  context.rows_after = rows_after;
  const SparseIndex index = build("tri_shape", problem.input(), triangle(4, 30, 50), context);
  EXPECT_EQ(index.head(0, 0).dense_last_rows, 30);
  EXPECT_EQ(index.head(1, 0).dense_last_rows, 0);
}

TEST(TriShape, RefusesMalformedRowsAfter) {
  const Problem problem = make_problem({});
  const std::int64_t rows_after[] = {-3, 0};
  for (const auto& [count, message] :
       {std::pair{std::size_t{1}, "sequence 0 is -3; legal: 0 or more"}, {2, "2 entries; legal"}}) {
    MethodContext context;
    context.rows_after = {rows_after, count};
    try {
      build("tri_shape", problem.input(), {}, context);
      ADD_FAILURE() << "not refused";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
}

TEST(Dilated1, KeepsItsRule) {
  for (const auto& [n_init, n_local, stride] : {std::tuple{5, 40, 2},
                                                {0, 1, 1},
                                                {0, 1, 7},
                                                {20, 111, 3},
                                                {8, 64, 1},
                                                {0, 1000, 2},
                                                {0, 1000, 63},
                                                {3, 400, 64},
                                                {50, 100, 1000},
                                                {1000, 5, 2}}) {
    expect_rule_on_every_shape(
        "dilated1",
        {{"n_init", static_cast<double>(n_init)},
         {"n_local", static_cast<double>(n_local)},
         {"stride", static_cast<double>(stride)}},
        [n_init = n_init, n_local = n_local, stride = stride](auto position, auto key, auto) {
          const std::int64_t offset = position - key;
          return key < n_init || (offset < n_local && offset % stride == 0);
        });
  }
}

TEST(Dilated2, KeepsItsRule) {
  for (const char* name : {"dilated2", "strided"}) {
    for (const auto& [n_init, n_local, n_dilated, stride] : {std::tuple{5, 20, 40, 2},
                                                             {0, 1, 0, 1},
                                                             {3, 17, 100, 3},
                                                             {10, 64, 64, 1},
                                                             {0, 33, 1000, 2},
                                                             {7, 1000, 10, 2},
                                                             {1000, 1, 1, 1}}) {
      expect_rule_on_every_shape(name,
                                 {{"n_init", static_cast<double>(n_init)},
                                  {"n_local", static_cast<double>(n_local)},
                                  {"n_dilated", static_cast<double>(n_dilated)},
                                  {"stride", static_cast<double>(stride)}},
                                 [n_init = n_init, n_local = n_local, n_dilated = n_dilated,
                                  stride = stride](auto position, auto key, auto) {
                                   const std::int64_t offset = position - key;
                                   const std::int64_t behind = offset - n_local;
                                   return key < n_init || behind < 0 ||
                                          (behind < n_dilated && behind % stride == 0);
                                 });
    }
  }
}

TEST(TriMix, IsDenseBelowItsLayerAndATriangleFromItOn) {
  MethodOptions options = triangle(4, 30, 20);
  MethodContext context;
  for (const std::int64_t layer : {0, 15, 16, 40}) {
    context.layer = layer;
    expect_rule_on_every_shape(
        "tri_mix", options,
        layer < 16 ? [](auto, auto, auto) { return true; } : triangle_rule(4, 30, 20), context);
  }
  options["starting_layer"] = 3;
  context.layer = 2;
  expect_rule_on_every_shape(
      "tri_mix", options, [](auto, auto, auto) { return true; }, context);
  context.layer = 3;
  expect_rule_on_every_shape("tri_mix", options, triangle_rule(4, 30, 20), context);
}

TEST(TriMixMInference, IsATriangleFromItsLayerOn) {
  MethodContext context;
  context.layer = 16;
  expect_rule_on_every_shape("tri_mix_minference", triangle(4, 30, 20), triangle_rule(4, 30, 20),
                             context);
}

// The published constants, beyond the lengths that the shapes above have.
TEST(FixedMethods, DefaultsAreThePublishedSets) {
  Case c;
  c.q_len = 3;
  c.extra = 9000;
  c.q_heads = c.kv_heads = 1;
  c.dim = c.v_dim = 8;
  c.values = Values::kExact;
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  MethodContext deep;
  deep.layer = 16;
  expect_rule(build("a_shape", input, {}), input, triangle_rule(128, 3968, 0));
  expect_rule(build("tri_shape", input, {}), input, triangle_rule(128, 3968, 100));
  const std::int64_t many[] = {1000};
  deep.rows_after = many;
  expect_rule(build("tri_shape", input, {}, deep), input, triangle_rule(128, 3968, 100), 1000);
  for (const char* method : {"tri_mix", "tri_mix_minference"}) {
    expect_rule(build(method, input, {}, deep), input, triangle_rule(8, 512, 128), 1000);
  }
  expect_rule(build("dilated1", input, {}), input, [](auto position, auto key, auto) {
    return key < 1024 || (position - key < 8192 && (position - key) % 2 == 0);
  });
  expect_rule(build("dilated2", input, {}), input, [](auto position, auto key, auto) {
    const std::int64_t offset = position - key;
    return key < 1024 || offset < 2048 || (offset < 6144 && offset % 2 == 0);
  });
}

}  // namespace
}  // namespace minference::test
