// The lists of cases behind sweep.h. They cover every value of every axis, most of them alone.
#include <charconv>
#include <cstdlib>
#include <random>
#include <string>

#include "minference/error.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

constexpr std::int64_t kQueryLengths[] = {1,   2,   15,  16,  17,   63,   64,   65,  127,
                                          128, 129, 640, 997, 1000, 1023, 1025, 4097};
constexpr std::int64_t kExtras[] = {0, 1, 63, 64, 100, 1000, -1, -64, -100};
constexpr std::int64_t kHeadPairs[][2] = {{1, 1}, {2, 1},  {3, 1},  {5, 1},  {6, 1}, {7, 1},
                                          {8, 1}, {16, 1}, {28, 4}, {40, 8}, {64, 1}};
constexpr std::int64_t kHeadDims[] = {1, 8, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 255, 256};
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr Layout kLayouts[] = {Layout::kPacked, Layout::kPaddedRows, Layout::kHeadMajor};
constexpr std::int64_t kPageSizes[] = {1, 16, 64, 48};
constexpr Lengths kLengths[] = {Lengths::kFull, Lengths::kRagged, Lengths::kSomeEmpty};
constexpr Values kValues[] = {Values::kOrder1,      Values::kOrder30, Values::kAllEqual,
                              Values::kDominantKey, Values::kZeros,   Values::kDenormals,
                              Values::kExact};
constexpr MaskKind kMasks[] = {MaskKind::kNone, MaskKind::kCausal, MaskKind::kLeftPad,
                               MaskKind::kRandom};
constexpr Pattern kPatterns[] = {Pattern::kNone,        Pattern::kDenseHeads, Pattern::kAShape,
                                 Pattern::kUnionRuns,   Pattern::kBoxRuns,    Pattern::kExactRuns,
                                 Pattern::kStridedRuns, Pattern::kBlocks,     Pattern::kMixed};
constexpr Budget kBudgets[] = {Budget::kNothing, Budget::kOne, Budget::kSome, Budget::kAll,
                               Budget::kMoreThanAll};

// Adds the case as it is and with exact values, which show a wrong key that rounding would hide.
void add_both(std::vector<Case>& cases, Case c) {
  c.seed = cases.size() + 1;
  cases.push_back(c);
  c.values = Values::kExact;
  cases.push_back(c);
}

}  // namespace

std::size_t sweep_stride() {
  const char* const given = std::getenv("MINFERENCE_SWEEP_STRIDE");
  if (given == nullptr) return 1;
  const std::string text = given;
  std::size_t stride = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), stride);
  if (error != std::errc() || end != text.data() + text.size() || stride < 1) {
    throw InvalidArgument("MINFERENCE_SWEEP_STRIDE is '" + text + "'; legal: whole numbers from 1");
  }
  return stride;
}

std::vector<Case> shape_cases() {
  std::vector<Case> cases;
  for (const std::int64_t q_len : kQueryLengths) {
    Case c;
    c.q_len = q_len;
    c.extra = q_len % 2 == 0 ? 0 : 63;
    if (q_len > 500) c.q_heads = c.kv_heads = 1;
    if (q_len > 4000) c.dim = c.v_dim = 32;
    add_both(cases, c);
  }
  for (const std::int64_t extra : kExtras) {
    for (const std::int64_t q_len : {1, 65, 130}) {
      Case c;
      c.q_len = q_len;
      c.extra = extra;
      add_both(cases, c);
      c.causal = false;
      add_both(cases, c);
    }
  }
  for (const auto& [q_heads, kv_heads] : kHeadPairs) {
    Case c;
    c.q_heads = q_heads;
    c.kv_heads = kv_heads;
    add_both(cases, c);
  }
  for (const std::int64_t dim : kHeadDims) {
    Case c;
    c.dim = dim;
    c.v_dim = dim;
    add_both(cases, c);
    c.v_dim = 257 - dim;
    add_both(cases, c);
  }
  for (const std::int64_t batch : {1, 2, 3}) {
    for (const Lengths lengths : kLengths) {
      for (const std::int64_t q_len : {5, 333}) {
        Case c;
        c.batch = batch;
        c.lengths = lengths;
        c.q_len = q_len;
        c.extra = 100;
        c.q_heads = 2;
        add_both(cases, c);
      }
    }
  }
  return cases;
}

std::vector<Case> long_cases() {
  std::vector<Case> cases;
  // A few rows against many keys, like a late chunk or a decode step.
  for (const std::int64_t q_len : {1, 2, 3, 31, 33, 130}) {
    Case c;
    c.q_len = q_len;
    c.extra = 4096 - q_len;
    c.q_heads = 2;
    c.kv_heads = 1;
    c.dim = c.v_dim = 32;
    add_both(cases, c);
    c.pattern = Pattern::kMixed;
    c.q_heads = 6;
    add_both(cases, c);
  }
  // Around the powers of two at which 16-bit counters and offsets would wrap.
  for (const std::int64_t kv_len : {32767, 32768, 32769, 65535, 65536, 65537}) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const Values values : {Values::kOrder1, Values::kOrder30, Values::kExact}) {
        Case c;
        c.q_len = 3;
        c.extra = kv_len - c.q_len;
        c.q_heads = c.kv_heads = 1;
        c.dim = c.v_dim = 16;
        c.q_dtype = c.kv_dtype = dtype;
        c.values = values;
        c.seed = cases.size() + 1;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> storage_cases() {
  std::vector<Case> cases;
  for (const DType q_dtype : kDTypes) {
    for (const DType kv_dtype : kDTypes) {
      for (const DType out_dtype : kDTypes) {
        Case c;
        c.q_dtype = q_dtype;
        c.kv_dtype = kv_dtype;
        c.out_dtype = out_dtype;
        c.dim = 72;
        add_both(cases, c);
      }
    }
  }
  for (const Layout layout : kLayouts) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t page_size : {0, 1, 16, 48, 64}) {
        Case c;
        c.layout = layout;
        c.q_dtype = c.kv_dtype = dtype;
        c.page_size = page_size;
        c.batch = 2;
        c.lengths = page_size % 3 == 0 ? Lengths::kFull : Lengths::kRagged;
        c.dim = 40;
        c.v_dim = 80;
        add_both(cases, c);
      }
    }
  }
  return cases;
}

std::vector<Case> value_cases() {
  std::vector<Case> cases;
  for (const Values values : kValues) {
    for (const DType dtype : kDTypes) {
      for (const Pattern pattern : {Pattern::kNone, Pattern::kUnionRuns, Pattern::kBoxRuns}) {
        Case c;
        c.values = values;
        c.q_dtype = c.kv_dtype = dtype;
        c.pattern = pattern;
        c.q_len = 200;
        c.seed = cases.size() + 1;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> pattern_cases() {
  std::vector<Case> cases;
  for (const Pattern pattern : kPatterns) {
    for (const Budget budget : kBudgets) {
      for (const std::int64_t q_len : {1, 63, 130}) {
        for (const std::int64_t extra : {0, 150}) {
          Case c;
          c.pattern = pattern;
          c.budget = budget;
          c.q_len = q_len;
          c.extra = extra;
          if (pattern == Pattern::kMixed) c.q_heads = 6;
          c.dim = c.v_dim = 32;
          add_both(cases, c);
        }
      }
    }
    for (const std::int64_t extra : {0, 1000}) {
      Case c;
      c.pattern = pattern;
      c.q_len = extra == 0 ? 1025 : 640;
      c.extra = extra;
      c.q_heads = c.kv_heads = pattern == Pattern::kMixed ? 6 : 1;
      c.dim = c.v_dim = 32;
      add_both(cases, c);
    }
    for (const std::int64_t dense_last_rows : {1, 64, 100, 1000}) {
      Case c;
      c.pattern = pattern;
      c.q_len = 300;
      c.dense_last_rows = dense_last_rows;
      if (pattern == Pattern::kMixed) c.q_heads = 6;
      c.dim = c.v_dim = 32;
      add_both(cases, c);
    }
    for (const std::int64_t extra : {-1, -70}) {
      Case c;
      c.pattern = pattern;
      c.q_len = 150;
      c.extra = extra;
      add_both(cases, c);
    }
    Case c;
    c.pattern = pattern;
    c.batch = 3;
    c.lengths = Lengths::kSomeEmpty;
    c.q_len = 333;
    c.page_size = 16;
    c.dense_last_rows = 10;
    add_both(cases, c);
  }
  return cases;
}

namespace {

using Feature = void (*)(Case&);
constexpr Feature kFeatures[] = {
    [](Case& c) { c.scale = 0.25F; },
    [](Case& c) { c.scale = -0.1F; },
    [](Case& c) { c.soft_cap = 30; },
    [](Case& c) { c.soft_cap = 0.5F; },
    [](Case& c) { c.sinks = true; },
    [](Case& c) { c.window = 1; },
    [](Case& c) { c.window = 64; },
    [](Case& c) { c.window = 100; },
    [](Case& c) { c.mask = MaskKind::kLeftPad; },
    [](Case& c) { c.mask = MaskKind::kRandom; },
    [](Case& c) {
      c.lengths = Lengths::kRagged;
      c.batch = 3;
    },
    [](Case& c) { c.page_size = 16; },
    [](Case& c) { c.q_dtype = c.kv_dtype = c.out_dtype = DType::kF16; },
    [](Case& c) { c.layout = Layout::kHeadMajor; },
    [](Case& c) { c.pattern = Pattern::kUnionRuns; },
    [](Case& c) { c.pattern = Pattern::kStridedRuns; },
    [](Case& c) { c.pattern = Pattern::kBlocks; },
    [](Case& c) { c.causal = false; },
};

}  // namespace

std::vector<Case> feature_cases() {
  std::vector<Case> cases;
  for (std::size_t a = 0; a < std::size(kFeatures); ++a) {
    for (std::size_t b = a; b < std::size(kFeatures); ++b) {
      Case c;
      c.q_len = 140;
      kFeatures[a](c);
      kFeatures[b](c);
      add_both(cases, c);
    }
  }
  return cases;
}

std::vector<Case> random_cases(std::int64_t count, std::uint64_t seed) {
  constexpr std::int64_t kAffordable = 20'000'000;
  std::mt19937_64 random(seed);
  const auto any = [&](const auto& list) { return list[random() % std::size(list)]; };
  std::vector<Case> cases;
  while (static_cast<std::int64_t>(cases.size()) < count) {
    Case c;
    c.seed = random();
    c.batch = 1 + static_cast<std::int64_t>(random() % 3);
    c.q_len = any(kQueryLengths);
    c.extra = any(kExtras);
    const auto& heads = kHeadPairs[random() % std::size(kHeadPairs)];
    c.q_heads = heads[0];
    c.kv_heads = heads[1];
    c.dim = any(kHeadDims);
    c.v_dim = any(kHeadDims);
    c.q_dtype = any(kDTypes);
    c.kv_dtype = any(kDTypes);
    c.out_dtype = any(kDTypes);
    c.layout = any(kLayouts);
    c.page_size = random() % 2 == 0 ? 0 : any(kPageSizes);
    c.lengths = any(kLengths);
    c.values = any(kValues);
    c.mask = random() % 3 == 0 ? any(kMasks) : MaskKind::kNone;
    c.pattern = any(kPatterns);
    c.budget = any(kBudgets);
    c.dense_last_rows = random() % 4 == 0 ? static_cast<std::int64_t>(random() % 100) : 0;
    c.scale = random() % 4 == 0 ? 0.2F : 0.0F;
    c.soft_cap = random() % 4 == 0 ? 30.0F : 0.0F;
    c.window = random() % 4 == 0 ? 1 + static_cast<std::int64_t>(random() % 200) : 0;
    c.sinks = random() % 4 == 0;
    if (cost(c) <= kAffordable) cases.push_back(c);
  }
  return cases;
}

}  // namespace minference::test
