// mminference in prompts with visual segments, on the device against the CPU.
#include "method_index.h"

namespace minference::cuda_test {
namespace {

constexpr int kAuto = 0;
constexpr int kGrid = 1;
constexpr int kQBoundary = 2;
constexpr int k2DBoundary = 3;
constexpr int kVerticalSlash = 4;
constexpr const char* kKinds[] = {"auto", "grid", "q_boundary", "2d_boundary", "vertical_slash"};

int failures = 0;

Segment visual(std::int64_t begin, std::int64_t end, std::int64_t stride = 0) {
  return {begin, end, Modality::kVisual, stride};
}

void check_case(int kind, MethodOptions options, Shape shape, const SegmentLists& segments,
                const Fill& values, bool exact) {
  options["kind"] = kind;
  shape.name += std::string(" ") + kKinds[kind];
  if (!check_index("mminference", options, shape, values, exact, segments)) ++failures;
}

bool inside(const std::vector<Segment>& segments, int token) {
  return std::any_of(segments.begin(), segments.end(),
                     [=](const Segment& s) { return token >= s.begin && token < s.end; });
}

// Heavy keys, for the rows of one modality each: all that has any mass, so that the sets are exact.
// Every 7th key of every 31 is heavy for rows of text, those on the lines of a grid for visual ones.
void check_exact(int kind, int q_tokens, int kv_tokens, const std::vector<Segment>& segments,
                 DType dtype) {
  const Shape shape{
      .name = "exact " + std::to_string(q_tokens) + " of " + std::to_string(kv_tokens),
      .q_tokens = q_tokens,
      .kv_tokens = kv_tokens,
      .q_heads = 4,
      .kv_heads = 2,
      .dtype = dtype,
      .scale = 1};
  const int first = kv_tokens - q_tokens;
  const auto heavy_for_text = [](int token, int h) { return token % 31 == 7 + h; };
  const auto heavy_for_visual = [&](int token, int h) {
    return inside(segments, token) && token % 97 == 40 + h;
  };
  check_case(
      kind,
      {{"vertical_size", 400},
       {"slash_size", 100},
       {"n_init", 20},
       {"n_local", 70},
       {"min_gain", 0.1}},
      shape, {segments},
      [&](bool is_key, int, int t, int h, int d) {
        if (d == 3 && is_key) return t < 5 || heavy_for_text(t, h) ? 16.0F : 0.0F;
        if (d == 5 && is_key) return t < 5 || heavy_for_visual(t, h) ? 16.0F : 0.0F;
        if (is_key || d != (inside(segments, first + t) ? 5 : 3)) return 0.0F;
        return 16.0F;
      },
      true);
}

// Rows that look a period back; heads of the diagonal form keep those offsets.
void check_exact_offsets(int kind, DType dtype) {
  constexpr int kPeriod = 256;
  constexpr int kPhase = 137;
  const Shape shape{.name = "exact offsets",
                    .q_tokens = 777,
                    .kv_tokens = 4100,
                    .q_heads = 2,
                    .kv_heads = 1,
                    .dim = kPeriod,
                    .dtype = dtype,
                    .scale = 1};
  check_case(
      kind, {{"vertical_size", 30}, {"slash_size", 300}}, shape,
      {{visual(1003, 2001), visual(2500, 3700), visual(4090, 4100)}},
      [&](bool is_key, int, int t, int, int d) {
        if (is_key) return t % kPeriod == d ? 16.0F : 0.0F;
        return (4100 - 777 + t - kPhase) % kPeriod == d ? 16.0F : 0.0F;
      },
      true);
}

void check_random() {
  const MethodOptions options = {{"vertical_size", 200}, {"slash_size", 200}, {"n_init", 40},
                                 {"n_local", 200},       {"min_stride", 20},  {"max_stride", 150},
                                 {"min_gain", 0.02},     {"grid_share", 0.3}};
  const auto check = [&](const Shape& shape, const SegmentLists& segments) {
    for (const int kind : {kAuto, kGrid, kQBoundary, k2DBoundary, kVerticalSlash}) {
      check_case(kind, options, shape, segments, random_fill(7, shape.dim), false);
    }
    // Without grids; each of the other kinds, as far as the estimates agree to it.
    MethodOptions boundaries = options;
    boundaries["grid_share"] = 1;
    for (const double min_gain : {0.0, 0.02, 1.0}) {
      boundaries["min_gain"] = min_gain;
      check_case(kAuto, boundaries, shape, segments, random_fill(7, shape.dim), false);
    }
  };
  check({.name = "whole",
         .q_tokens = 4000,
         .kv_tokens = 4000,
         .q_heads = 8,
         .kv_heads = 2,
         .dim = 128},
        {{visual(500, 3500)}});
  check({.name = "ends in a picture",
         .q_tokens = 900,
         .kv_tokens = 5000,
         .q_heads = 6,
         .kv_heads = 2},
        {{visual(0, 1000), visual(1000, 3111, 100), visual(3200, 5000)}});
  check({.name = "text behind", .q_tokens = 300, .kv_tokens = 5000, .q_heads = 4, .kv_heads = 4},
        {{visual(33, 4500, 64)}});
  check({.name = "short runs",
         .q_tokens = 600,
         .kv_tokens = 3333,
         .q_heads = 2,
         .kv_heads = 1,
         .dtype = DType::kF16},
        {{visual(100, 1500), visual(2800, 2817), visual(2900, 2901), visual(3320, 3330)}});
  check(
      {.name = "before the first", .q_tokens = 500, .kv_tokens = 2000, .q_heads = 2, .kv_heads = 2},
      {{visual(2000 - 1, 2000)}});
  check({.name = "ragged",
         .batch = 4,
         .q_tokens = 700,
         .kv_tokens = 4000,
         .q_heads = 4,
         .kv_heads = 2,
         .q_lens = {700, 3, 0, 650},
         .kv_lens = {4000, 1900, 2000, 650}},
        {{visual(1000, 3600)}, {visual(200, 1900)}, {visual(3, 9)}, {}});
  check({.name = "window",
         .q_tokens = 600,
         .kv_tokens = 4000,
         .q_heads = 2,
         .kv_heads = 1,
         .window = 1500},
        {{visual(1000, 3900)}});
  check({.name = "more rows than keys",
         .q_tokens = 900,
         .kv_tokens = 600,
         .q_heads = 2,
         .kv_heads = 1},
        {{visual(50, 560)}});
  check({.name = "one row", .q_tokens = 1, .kv_tokens = 3000, .q_heads = 2, .kv_heads = 2},
        {{visual(50, 3000)}});
  check({.name = "short", .q_tokens = 40, .kv_tokens = 40, .q_heads = 2, .kv_heads = 2},
        {{visual(5, 30)}});
  std::vector<Segment> many;
  for (int i = 0; i < 1500; ++i) many.push_back(visual(4 * i + 100, 4 * i + 102));
  many.push_back(visual(6200, 7900, 30));
  check({.name = "many pictures", .q_tokens = 1000, .kv_tokens = 8000, .q_heads = 2, .kv_heads = 1},
        {many});
  for (Shape shape : storage_shapes(600, 4000)) {
    SegmentLists segments(shape.batch, {visual(1000, 3700)});
    check(shape, segments);
  }
}

void check_all() {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int kind : {kAuto, kGrid, kQBoundary, k2DBoundary, kVerticalSlash}) {
      check_exact(kind, 1000, 5000, {visual(700, 3000), visual(3005, 4400)}, dtype);
      check_exact(kind, 333, 4444, {visual(97, 4444, 97)}, dtype);
    }
    for (const int kind : {kQBoundary, k2DBoundary, kVerticalSlash}) {
      check_exact_offsets(kind, dtype);
    }
  }
  check_random();
  check_case(kAuto, {},
             {.name = "128k",
              .q_tokens = 2048,
              .kv_tokens = 131072,
              .q_heads = 8,
              .kv_heads = 2,
              .dim = 128},
             {{visual(1000, 130000)}}, random_fill(7, 128), false);
}

void time_all() {
  for (const int tokens : {32768, 131072}) {
    time_index("mminference", tokens, {}, {{visual(1000, tokens - 500)}});
  }
}

}  // namespace
}  // namespace minference::cuda_test

int main(int argc, char** argv) {
  using namespace minference::cuda_test;  // NOLINT(google-build-using-namespace)
  return run_index_test(argc, argv, failures, check_all, time_all);
}
