#include "minference/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "attention/cpu/kernel_table.h"
#include "minference/attention.h"
#include "minference/error.h"
#include "support/problem.h"

namespace minference {
namespace {

constexpr IsaLevel kLevels[] = {IsaLevel::kGeneric,    IsaLevel::kAvx2,    IsaLevel::kAvx512,
                                IsaLevel::kAvx512Bf16, IsaLevel::kAmxBf16, IsaLevel::kNeon,
                                IsaLevel::kNeonBf16};
constexpr const char* kVariable = "MINFERENCE_FORCE_ISA";

bool contains(const std::vector<IsaLevel>& levels, IsaLevel level) {
  return std::find(levels.begin(), levels.end(), level) != levels.end();
}

TEST(Isa, NamesAreParsedBack) {
  for (const IsaLevel level : kLevels) EXPECT_EQ(parse_isa(isa_name(level)), level);
}

TEST(Isa, UnknownNamesAreRefusedWithTheValidOnes) {
  for (const char* name : {"", "AVX2", "avx", "avx512bf16", "native", "avx2 "}) {
    try {
      parse_isa(name);
      FAIL() << name;
    } catch (const InvalidArgument& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("'" + std::string(name) + "'"), std::string::npos) << what;
      EXPECT_NE(what.find("generic, avx2, avx512, avx512_bf16, amx_bf16, neon, neon_bf16"),
                std::string::npos);
    }
  }
}

TEST(Isa, LevelsNamedBf16MultiplyInBf16) {
  for (const IsaLevel level : kLevels) {
    const bool named = std::string(isa_name(level)).ends_with("_bf16");
    EXPECT_EQ(isa_is_bf16(level), named) << isa_name(level);
  }
}

TEST(Isa, AvailableLevelsAreCompiledAndAscend) {
  const std::vector<IsaLevel> compiled = compiled_isa_levels();
  const std::vector<IsaLevel> available = available_isa_levels();
  ASSERT_FALSE(available.empty());
  EXPECT_EQ(available.front(), IsaLevel::kGeneric);
  EXPECT_TRUE(std::is_sorted(available.begin(), available.end()));
  EXPECT_TRUE(std::is_sorted(compiled.begin(), compiled.end()));
  for (const IsaLevel level : available) EXPECT_TRUE(contains(compiled, level));
}

TEST(Isa, TheFastestLevelIsChosen) {
  if (std::getenv(kVariable) != nullptr) GTEST_SKIP() << kVariable << " is set";
  EXPECT_FALSE(isa_is_bf16(choose_isa(false)));
  for (const IsaLevel level : available_isa_levels()) {
    if (cpu::cpu_prefers(level)) {
      EXPECT_GE(choose_isa(true), level);
      if (!isa_is_bf16(level)) {
        EXPECT_GE(choose_isa(false), level);
      }
    }
  }
  EXPECT_TRUE(cpu::cpu_prefers(choose_isa(true)));
}

TEST(Isa, OnlyVectorProductsOfBf16AreEverPassedOver) {
  for (const IsaLevel level : kLevels) {
    if (level != IsaLevel::kAvx512Bf16) {
      EXPECT_TRUE(cpu::cpu_prefers(level)) << isa_name(level);
    }
  }
}

// A machine, or an emulator, that lacks the level it is meant to test would test less in silence.
// Unless a level is named, none is expected.
TEST(Isa, TheExpectedLevelIsAvailable) {
  const char* expected = std::getenv("MINFERENCE_EXPECT_ISA");
  if (expected == nullptr) return;
  EXPECT_TRUE(contains(available_isa_levels(), parse_isa(expected))) << expected;
}

TEST(Isa, LevelsOfAnotherProcessorFamilyAreNotCompiled) {
  for (const IsaLevel level : compiled_isa_levels()) {
    if (level == IsaLevel::kGeneric) continue;
    const bool arm = level == IsaLevel::kNeon || level == IsaLevel::kNeonBf16;
#ifdef __aarch64__
    EXPECT_TRUE(arm) << isa_name(level);
#else
    EXPECT_FALSE(arm) << isa_name(level);
#endif
  }
}

// The environment of a running process is read by other threads too, so each forced run has a
// process of its own: a death test that ends with status 0 when `check` holds.
class ForcedIsa : public testing::Test {
 protected:
  // An emulated program cannot start itself again; its test runs ask for the fast style.
  void SetUp() override {
    if (std::getenv("GTEST_DEATH_TEST_STYLE") == nullptr) {
      testing::FLAGS_gtest_death_test_style = "threadsafe";
    }
  }

  template <class Check>
  static void expect_when_forced(const char* name, Check check) {
    EXPECT_EXIT(
        {
          setenv(kVariable, name, 1);
          std::exit(check() ? 0 : 1);
        },
        testing::ExitedWithCode(0), "")
        << name;
  }

  // The level that a small call of attention() says it ran at.
  static IsaLevel level_that_ran(Precision precision) {
    const test::Problem problem = test::make_problem({});
    const AttentionInput input = problem.input();
    const test::Result result = test::make_result(input, DType::kF32, test::Layout::kPacked);
    AttentionParams params;
    params.precision = precision;
    return attention(input, params, result.output()).isa;
  }
};

TEST_F(ForcedIsa, TheForcedLevelRuns) {
  for (const IsaLevel level : available_isa_levels()) {
    expect_when_forced(isa_name(level), [=] {
      return choose_isa(true) == level && level_that_ran(Precision::kBF16) == level;
    });
  }
}

TEST_F(ForcedIsa, F32AccuracyNeverRunsInBf16) {
  for (const IsaLevel level : available_isa_levels()) {
    expect_when_forced(isa_name(level), [=] {
      const IsaLevel ran = level_that_ran(Precision::kF32);
      return isa_is_bf16(level) ? !isa_is_bf16(ran) : ran == level;
    });
  }
}

TEST_F(ForcedIsa, AnEmptyValueForcesNothing) {
  expect_when_forced("", [] { return choose_isa(true) == available_isa_levels().back(); });
}

TEST_F(ForcedIsa, UnknownLevelsAreRefused) {
  expect_when_forced("avx1024", [] {
    try {
      choose_isa(true);
    } catch (const InvalidArgument&) {
      return true;
    }
    return false;
  });
}

TEST_F(ForcedIsa, LevelsOfOtherMachinesAreRefused) {
  for (const IsaLevel level : kLevels) {
    if (contains(available_isa_levels(), level)) continue;
    expect_when_forced(isa_name(level), [=] {
      try {
        level_that_ran(Precision::kAuto);
      } catch (const Unsupported& error) {
        return std::string(error.what()).find(isa_name(level)) != std::string::npos;
      }
      return false;
    });
  }
}

}  // namespace
}  // namespace minference
