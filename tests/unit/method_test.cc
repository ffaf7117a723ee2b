#include "minference/method.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <sstream>
#include <string>

#include "minference/error.h"
#include "support/problem.h"

namespace minference {
namespace {

// The message of the InvalidArgument that `call` throws.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return "";
}

TEST(Methods, AreFoundByTheirNames) {
  std::set<std::string> names;
  for (const Method* method : attention_methods()) {
    EXPECT_EQ(&find_method(method->name()), method);
    EXPECT_FALSE(std::string(method->summary()).empty());
    names.insert(method->name());
  }
  EXPECT_EQ(names.size(), attention_methods().size());
  for (const char* name : {"auto", "dense", "minference", "vertical_slash", "static", "a_shape",
                           "tri_shape", "dilated1", "dilated2", "tri_mix", "tri_mix_minference",
                           "block_sparse", "flexprefill", "xattention", "inf_llm", "mminference"}) {
    EXPECT_EQ(names.count(name), 1U) << name;
  }
}

TEST(Methods, AliasesAreOtherNamesOfOneMethod) {
  EXPECT_EQ(&find_method("strided"), &find_method("dilated2"));
  std::set<std::string> names;
  std::size_t count = 0;
  for (const Method* method : attention_methods()) {
    names.insert(method->name());
    ++count;
    for (const char* alias : method->aliases()) {
      EXPECT_EQ(&find_method(alias), method);
      names.insert(alias);
      ++count;
    }
  }
  EXPECT_EQ(names.size(), count);
  EXPECT_NE(attention_method_names().find("dilated2 (strided)"), std::string::npos);
}

TEST(Methods, UnknownNamesAreRefusedWithTheValidOnes) {
  const std::string what = refusal([] { find_method("vertical-slash"); });
  EXPECT_NE(what.find("'vertical-slash'"), std::string::npos) << what;
  for (const Method* method : attention_methods()) {
    EXPECT_NE(what.find(method->name()), std::string::npos) << what;
  }
}

TEST(Methods, DefaultsAreLegalAndDocumented) {
  for (const Method* method : attention_methods()) {
    const MethodOptions resolved = resolve_options(*method, {});
    EXPECT_EQ(resolved.size(), method->options().size());
    for (const MethodOption& option : method->options()) {
      EXPECT_EQ(resolved.at(option.name), option.default_value);
      EXPECT_FALSE(option.help.empty());
      EXPECT_NO_THROW(resolve_options(*method, {{option.name, option.min_value}}));
      EXPECT_NO_THROW(resolve_options(*method, {{option.name, option.max_value}}));
    }
  }
}

TEST(Methods, PublishedDefaults) {
  const MethodOptions vertical_slash = resolve_options(find_method("vertical_slash"), {});
  EXPECT_EQ(vertical_slash.at("vertical_size"), 1000);
  EXPECT_EQ(vertical_slash.at("slash_size"), 6096);
  EXPECT_EQ(vertical_slash.at("estimate_every"), 2048);
  const MethodOptions a_shape = resolve_options(find_method("a_shape"), {});
  EXPECT_EQ(a_shape.at("n_init"), 128);
  EXPECT_EQ(a_shape.at("n_local"), 3968);
  EXPECT_EQ(resolve_options(find_method("block_sparse"), {}), (MethodOptions{{"top_k", 100}}));
  EXPECT_EQ(resolve_options(find_method("flexprefill"), {}),
            (MethodOptions{{"gamma", 0.9},
                           {"tau", 0.1},
                           {"min_budget", 0},
                           {"max_budget", 0},
                           {"block_size", 128},
                           {"estimate_every", 2048}}));
  EXPECT_EQ(resolve_options(find_method("xattention"), {}),
            (MethodOptions{{"stride", 8}, {"threshold", 0.9}, {"block_size", 128}, {"norm", 1}}));
  EXPECT_EQ(resolve_options(find_method("inf_llm"), {}), (MethodOptions{{"n_init", 128},
                                                                        {"n_local", 4096},
                                                                        {"topk", 16},
                                                                        {"repr_topk", 4},
                                                                        {"block_size", 128},
                                                                        {"exc_block_size", 512}}));
  EXPECT_EQ(resolve_options(find_method("static"), {}),
            (MethodOptions{{"vertical_size", 1000}, {"slash_size", 6096}}));
  EXPECT_EQ(resolve_options(find_method("tri_shape"), {}),
            (MethodOptions{{"n_init", 128}, {"n_local", 3968}, {"n_last", 100}}));
  EXPECT_EQ(resolve_options(find_method("dilated1"), {}),
            (MethodOptions{{"n_init", 1024}, {"n_local", 8192}, {"stride", 2}}));
  EXPECT_EQ(
      resolve_options(find_method("dilated2"), {}),
      (MethodOptions{{"n_init", 1024}, {"n_local", 2048}, {"n_dilated", 4096}, {"stride", 2}}));
  MethodOptions tri_mix{{"n_init", 8}, {"n_local", 512}, {"n_last", 128}, {"starting_layer", 16}};
  EXPECT_EQ(resolve_options(find_method("tri_mix"), {}), tri_mix);
  tri_mix["minference_ratio"] = 1;
  EXPECT_EQ(resolve_options(find_method("tri_mix_minference"), {}), tri_mix);
}

TEST(Methods, GivenOptionsReplaceDefaults) {
  const MethodOptions resolved =
      resolve_options(find_method("vertical_slash"), {{"slash_size", 7}});
  EXPECT_EQ(resolved.at("slash_size"), 7);
  EXPECT_EQ(resolved.at("vertical_size"), 1000);
}

TEST(Methods, RefusesUnknownOptions) {
  const std::string what = refusal([] {
    resolve_options(find_method("vertical_slash"), {{"slash", 7}});
  });
  EXPECT_NE(what.find("'slash'"), std::string::npos) << what;
  EXPECT_NE(what.find("vertical_size, slash_size"), std::string::npos) << what;
}

TEST(Methods, RefusesOptionValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Method* method : attention_methods()) {
    for (const MethodOption& option : method->options()) {
      for (const double value : {option.min_value - 1, option.max_value + 1, double{nan},
                                 std::numeric_limits<double>::infinity()}) {
        const std::string what = refusal([&] { resolve_options(*method, {{option.name, value}}); });
        EXPECT_NE(what.find(option.name), std::string::npos) << what;
        EXPECT_NE(what.find("legal"), std::string::npos) << what;
      }
      if (option.integer) {
        EXPECT_THROW(resolve_options(*method, {{option.name, option.min_value + 0.5}}),
                     InvalidArgument);
      }
    }
  }
}

TEST(Methods, RefusesSizesThatDoNotFitTheBlocksOfAnIndex) {
  for (const char* method : {"flexprefill", "xattention"}) {
    for (const double size : {0, 63, 65, 100, 200, 1088}) {
      const std::string what = refusal([&] {
        resolve_options(find_method(method), {{"block_size", size}});
      });
      std::ostringstream number;
      number << size;
      EXPECT_NE(what.find("is " + number.str() + "; legal: multiples of 64 from 64 to 1024"),
                std::string::npos)
          << what;
    }
    EXPECT_NO_THROW(resolve_options(find_method(method), {{"block_size", 192}}));
  }
  for (const double stride : {0, 3, 6, 12, 65, 128}) {
    const std::string what = refusal([&] {
      resolve_options(find_method("xattention"), {{"stride", stride}});
    });
    EXPECT_NE(what.find("legal: divisors of 64 from 1 to 64"), std::string::npos) << what;
  }
}

TEST(Methods, RefusalsNameValueAndRange) {
  for (const auto& [method, option, value, expected] :
       {std::tuple{"tri_shape", "n_last", -1.0,
                   "n_last of method tri_shape is -1; legal: whole "
                   "numbers from 0 to 1000000000"},
        {"a_shape", "n_local", 0.0, "is 0; legal: whole numbers from 1 to 1000000000"},
        {"strided", "stride", 0.0,
         "method dilated2 is 0; legal: whole numbers from 1 to 1000000000"},
        {"dilated1", "n_init", 0.5, "is 0.5; legal: whole numbers from 0 to 1000000000"},
        {"tri_mix", "starting_layer", -1.0, "is -1; legal: whole numbers from 0 to 1000000"},
        {"tri_mix_minference", "minference_ratio", 0.0, "is 0; legal: numbers from 0.001 to"},
        {"static", "slash_size", 2e9,
         "is 2000000000; legal: whole numbers from 0 to 1000000000"}}) {
    const std::string what = refusal([&, m = method, o = option, v = value] {
      resolve_options(find_method(m), {{o, v}});
    });
    EXPECT_NE(what.find(expected), std::string::npos) << what;
  }
}

// What a message says of a value just beyond the range differs from the range's end.
TEST(Methods, RefusalsNameAllDigits) {
  for (const auto& [option, value, expected] :
       {std::tuple{"n_local", 1000000001.0,
                   "is 1000000001; legal: whole numbers from 1 to 1000000000"},
        {"n_local", 48.0000001, "is 48.0000001; legal: whole numbers from 1 to 1000000000"}}) {
    const std::string what = refusal([&, o = option, v = value] {
      resolve_options(find_method("a_shape"), {{o, v}});
    });
    EXPECT_NE(what.find(expected), std::string::npos) << what;
  }
}

TEST(ParseOption, ReadsNumbers) {
  MethodOptions options;
  parse_option("vertical_size=500", options);
  parse_option("ratio=0.5", options);
  parse_option("ratio=2.5e-1", options);
  parse_option("below=-3", options);
  EXPECT_EQ(options, (MethodOptions{{"vertical_size", 500}, {"ratio", 0.25}, {"below", -3}}));
}

TEST(ParseOption, RefusesEverythingElse) {
  for (const char* text : {"", "=", "a", "a=", "=1", "a=b", "a=1x", "a= 1", "a=1 ", "a=nan",
                           "a=inf", "a=-inf", "a=1e999", "a=0x10", "a==1"}) {
    MethodOptions options;
    EXPECT_THROW(parse_option(text, options), InvalidArgument) << text;
    EXPECT_TRUE(options.empty()) << text;
  }
}

// attention() by method over the default problem, changed.
Stats run_method(const char* method, const MethodOptions& options, const MethodContext& context,
                 const test::Case& c) {
  const test::Problem problem = test::make_problem(c);
  const AttentionInput input = problem.input();
  const test::Result result = test::make_result(input, DType::kF32, test::Layout::kPacked);
  return attention(input, problem.params, result.output(), find_method(method), options, context);
}

TEST(MethodAttention, ReportsTheMethodAndItsSavings) {
  test::Case c;
  c.q_len = 600;
  c.q_heads = c.kv_heads = 1;
  const Stats dense = run_method("dense", {}, {}, c);
  EXPECT_EQ(dense.method, "dense");
  EXPECT_EQ(dense.kept_fraction(), 1.0);
  const Stats sparse = run_method("a_shape", {{"n_init", 10}, {"n_local", 20}}, {}, c);
  EXPECT_EQ(sparse.method, "a_shape");
  EXPECT_EQ(sparse.causal_pairs, dense.causal_pairs);
  EXPECT_LT(sparse.kept_fraction(), 0.1);
  EXPECT_TRUE(sparse.fallbacks.empty());
}

TEST(MethodAttention, RefusesOptionsBeforeItRuns) {
  for (const Method* method : attention_methods()) {
    EXPECT_THROW(run_method(method->name(), {{"no_such_option", 1}}, {}, {}), InvalidArgument);
  }
}

TEST(MethodAttention, FallsBackToDenseUnderAMaskAndSaysSo) {
  test::Case c;
  c.q_len = 300;
  c.mask = test::MaskKind::kRandom;
  const Stats masked = run_method("vertical_slash", {{"slash_size", 100}}, {}, c);
  EXPECT_EQ(masked.kept_pairs, masked.causal_pairs);
  EXPECT_EQ(masked.fallbacks.size(), 1U);
  c.mask = test::MaskKind::kNone;
  c.causal = false;
  const Stats bidirectional = run_method("vertical_slash", {{"slash_size", 100}}, {}, c);
  EXPECT_EQ(bidirectional.kept_pairs, bidirectional.causal_pairs);
  EXPECT_EQ(bidirectional.fallbacks.size(), 1U);
}

TEST(MethodAttention, RefusesBudgetsThatContradictEachOther) {
  const std::string what = refusal([] {
    run_method("flexprefill", {{"min_budget", 1000}, {"max_budget", 500}}, {}, {});
  });
  EXPECT_NE(what.find("max_budget"), std::string::npos) << what;
  EXPECT_NE(what.find("is 500; legal"), std::string::npos) << what;
  EXPECT_NE(what.find("1000"), std::string::npos) << what;
}

}  // namespace
}  // namespace minference
