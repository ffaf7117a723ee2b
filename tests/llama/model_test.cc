// The plug-in inside llama.cpp on a real model: everything that a host does with its KV cache must
// give the logits that stock llama.cpp gives.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "llama/host.h"
#include "llama/model.h"
#include "minference/isa.h"

namespace minference::testing {
namespace {

// Largest difference of a logit to stock llama.cpp's that rounding explains, on f32 weights; logits
// span about 40. Measured: up to 0.03 with f32 products, where only the order of sums differs, and
// 0.02-0.19 with bf16 products (8 bits of mantissa instead of 11), which is also what stock
// differs from itself by when the chunk size changes (ChunkSizeDoesNotMatter prints it). What one
// wrong key does is measured by the tests of single operations.
constexpr double kF32Bound = 0.06;
constexpr double kBf16Bound = 0.25;

// Every batch of at least 64 rows is taken, however few the keys. The sparse budgets are raised to
// what the method always keeps.
const nlohmann::json kStock = {{"attn", "stock"}};
// Matrix products stay ggml's but in the tests of our own.
const nlohmann::json kDense = {{"attn", "dense"}, {"min_kv", 1}, {"linear", "0"}};
const nlohmann::json kLinear = {{"attn", "dense"}, {"min_kv", 1}, {"linear", "1"}};
const nlohmann::json kDenseF32 = {{"attn", "dense"}, {"min_kv", 1}, {"precision", "f32"}};
const nlohmann::json kSparse = {{"attn", "vertical_slash"},
                                {"min_kv", 1},
                                {"linear", "0"},
                                {"options", {{"vertical_size", 0}, {"slash_size", 0}}}};

void configure(const nlohmann::json& config) { ASSERT_EQ(Host::get().configure(config), ""); }

void expect_close(const Logits& actual, const Logits& expected, double bound,
                  const std::string& what) {
  const double difference = largest_difference(actual, expected);
  std::printf("  %s: largest logit difference %.5f\n", what.c_str(), difference);
  EXPECT_LE(difference, bound) << what;
}

// Runs `scenario` with stock llama.cpp and with dense attention in f32 and in bf16, and compares
// all logits that it returns; then with a sparse method. `reason`: the fallback that the scenario
// causes for the sparse method, or empty.
template <class Scenario>
void expect_like_stock(const Scenario& scenario, const std::string& reason = "") {
  configure(kStock);
  const std::vector<Logits> expected = scenario();
  EXPECT_EQ(Host::get().calls(), 0);
  for (const auto& [name, config, bound] :
       {std::tuple{"f32", kDenseF32, kF32Bound}, {"auto", kDense, kBf16Bound}}) {
    configure(config);
    const std::vector<Logits> actual = scenario();
    EXPECT_GT(Host::get().calls(), 0);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      expect_close(actual[i], expected[i], bound, "output " + std::to_string(i) + ", " + name);
    }
  }
  configure(kSparse);
  for (const Logits& logits : scenario()) EXPECT_EQ(largest_difference(logits, logits), 0.0);
  const nlohmann::json stats = Host::get().stats();
  const nlohmann::json& fallbacks = stats.at("fallbacks");
  if (reason.empty()) {
    EXPECT_TRUE(fallbacks.empty()) << fallbacks;
    EXPECT_LT(stats.at("kept_pairs"), stats.at("causal_pairs"));
  } else {
    EXPECT_GT(fallbacks.value(reason, 0), 0) << fallbacks;
  }
}

constexpr char kMaskReason[] = "mask is not a causal prefix";

// 4096 tokens: a scene, then one passage of it over and over, so that the model's decisions are
// clear and "the same tokens" does not hang on a rounding.
std::vector<llama_token> clear_prompt() {
  const TestModel& model = TestModel::get();
  auto prompt = model.text(2000);
  const auto passage = model.text(150, 500);
  while (prompt.size() < 4096) prompt.push_back(passage[(prompt.size() - 2000) % passage.size()]);
  return prompt;
}

void expect_greedy_tokens_of_stock(Weights weights, double f32_bound, double bf16_bound) {
  const auto prompt = clear_prompt();
  const auto size = static_cast<int>(prompt.size());
  const auto run = [&](Logits& logits, double& margin) {
    TestContext context({.weights = weights, .size = size + 64, .ubatch = 2048});
    logits = context.append(prompt, 0);
    return context.greedy(logits, size, 32, &margin);
  };
  double margin = 0;
  Logits expected_logits;
  configure(kStock);
  const auto expected = run(expected_logits, margin);
  std::printf("  closest decision of stock: best and second best logit differ by %.4f\n", margin);
  for (const auto& [config, bound] :
       {std::pair{kDenseF32, f32_bound}, std::pair{kDense, bf16_bound}}) {
    configure(config);
    Logits logits;
    double ignored = 0;
    EXPECT_EQ(run(logits, ignored), expected) << config;
    EXPECT_EQ(Host::get().calls(), 2 * 30);
    expect_close(logits, expected_logits, bound, config.dump());
  }
}

TEST(Model, DenseGivesTheGreedyTokensOfStock) {
  // The file's 8-bit activations amplify any difference to about half of this; see model.h.
  expect_greedy_tokens_of_stock(Weights::kFile, 2.0, 2.0);
}

TEST(Model, DenseGivesTheGreedyTokensOfStockWithF32Weights) {
  expect_greedy_tokens_of_stock(Weights::kF32, kF32Bound, kBf16Bound);
}

// Our products round activations to bf16, ggml's to 8 bits in groups: ours are the closer ones. With
// f32 weights only ours round; the bound is that of bf16 attention, doubled for as many products
// again.
TEST(Model, MatrixProductsGiveTheGreedyTokensOfStock) {
  const auto prompt = clear_prompt();
  const auto size = static_cast<int>(prompt.size());
  const auto run = [&](Logits& logits) {
    TestContext context({.weights = Weights::kF32, .size = size + 64, .ubatch = 2048});
    logits = context.append(prompt, 0);
    double ignored = 0;
    return context.greedy(logits, size, 32, &ignored);
  };
  Logits expected_logits;
  configure(kStock);
  const auto expected = run(expected_logits);
  configure(kLinear);
  Logits logits;
  EXPECT_EQ(run(logits), expected);
  // At other levels, products of f32 weights are left to llama.cpp.
  const IsaLevel level = choose_isa(true);
  if (level == IsaLevel::kAvx512Bf16 || level == IsaLevel::kAmxBf16) {
    EXPECT_GT(Host::get().stats().at("linear_calls"), 0);
  }
  expect_close(logits, expected_logits, 2 * kBf16Bound, "products and attention");
}

TEST(Model, ChunkSizeDoesNotMatter) {
  const auto prompt = TestModel::get().text(930);
  const auto run = [&](int ubatch) {
    TestContext context({.size = 1024, .ubatch = ubatch});
    return context.append(prompt, 0);
  };
  Logits whole;
  for (const int ubatch : {8192, 512, 100, 64}) {
    const std::string name = "ubatch " + std::to_string(ubatch);
    configure(kStock);
    const Logits expected = run(ubatch);
    if (whole.empty()) whole = expected;
    // Not ours, but the yardstick: llama.cpp computes chunks below 64 rows in f16.
    expect_close(expected, whole, kBf16Bound, name + ", stock to stock in one chunk");
    configure(kDenseF32);
    expect_close(run(ubatch), expected, kF32Bound, name + ", dense to stock");
    const std::int64_t calls = Host::get().calls();
    EXPECT_EQ(calls, 30 * (ubatch > 930 ? 1 : (930 + ubatch - 64) / ubatch));
    configure(kSparse);
    run(ubatch);
    // A last chunk below 64 rows is llama.cpp's; no chunk is a fallback of ours.
    EXPECT_EQ(Host::get().calls(), calls);
    EXPECT_TRUE(Host::get().stats().at("fallbacks").empty());
  }
}

TEST(Model, ThreadCountDoesNotMatter) {
  const auto prompt = TestModel::get().text(400);
  configure(kDense);
  Logits expected;
  for (const int threads : {1, 2, 3}) {
    TestContext context({.size = 512, .threads = threads});
    const Logits logits = context.append(prompt, 0);
    if (threads == 1) expected = logits;
    EXPECT_LE(largest_difference(logits, expected), kF32Bound) << threads;
  }
}

// A budget that keeps every key computes what dense attention computes.
TEST(Model, FullBudgetIsDense) {
  const auto prompt = TestModel::get().text(400);
  const auto run = [&] {
    TestContext context({.size = 512});
    return context.append(prompt, 0);
  };
  configure(kDense);
  const Logits expected = run();
  configure({{"attn", "vertical_slash"},
             {"linear", "0"},
             {"min_kv", 1},
             {"options", {{"vertical_size", 100000}, {"slash_size", 100000}}}});
  EXPECT_LE(largest_difference(run(), expected), kF32Bound);
}

// Three prompts of different lengths in one batch.
std::vector<Logits> three_prompts(bool unified) {
  const TestModel& model = TestModel::get();
  TestContext context({.size = 768, .sequences = 3, .unified = unified});
  std::vector<Entry> batch;
  int sequence = 0;
  for (const std::size_t length : {300, 90, 170}) {
    const auto entries = entries_of(model.text(length, 1000 * sequence), 0, sequence);
    batch.insert(batch.end(), entries.begin(), entries.end());
    ++sequence;
  }
  return context.decode(batch);
}

TEST(Model, ParallelSequencesWithAStreamEach) {
  expect_like_stock([] { return three_prompts(false); });
}

// Each sequence is a run of its own, so even these stay sparse.
TEST(Model, ParallelSequencesInOneCache) {
  expect_like_stock([] { return three_prompts(true); });
}

TEST(Model, ParallelSequencesEqualSingleOnes) {
  configure(kDenseF32);
  for (const bool unified : {false, true}) {
    const auto together = three_prompts(unified);
    int sequence = 0;
    for (const std::size_t length : {300, 90, 170}) {
      TestContext alone({.size = 512});
      const Logits logits = alone.append(TestModel::get().text(length, 1000 * sequence), 0);
      EXPECT_LE(largest_difference(logits, together[sequence]), kF32Bound)
          << "sequence " << sequence << ", unified " << unified;
      ++sequence;
    }
  }
}

// Slots that decode beside a slot that reads a prompt, in one cache: continuous batching.
TEST(Model, PromptBesideDecodingSlots) {
  expect_like_stock(
      [] {
        const TestModel& model = TestModel::get();
        TestContext context({.size = 512, .sequences = 3, .unified = true});
        context.append(model.text(100, 50), 0, 0);
        context.append(model.text(70, 300), 0, 1);
        std::vector<Entry> batch = {{model.text(1, 150)[0], 100, 0, true},
                                    {model.text(1, 370)[0], 70, 1, true}};
        const auto prompt = entries_of(model.text(250, 900), 0, 2);
        batch.insert(batch.end(), prompt.begin(), prompt.end());
        return context.decode(batch);
      },
      kMaskReason);
}

TEST(Model, InterleavedSequencesInOneCache) {
  expect_like_stock(
      [] {
        const TestModel& model = TestModel::get();
        TestContext context({.size = 512, .sequences = 2, .unified = true});
        const auto a = entries_of(model.text(150), 0, 0);
        const auto b = entries_of(model.text(150, 1000), 0, 1);
        std::vector<Entry> batch;
        for (std::size_t i = 0; i < a.size(); ++i) {
          batch.push_back(a[i]);
          batch.push_back(b[i]);
        }
        return context.decode(batch);
      },
      kMaskReason);
}

TEST(Model, RangeRemovedInTheMiddle) {
  expect_like_stock(
      [] {
        const TestModel& model = TestModel::get();
        TestContext context({.size = 512});
        context.append(model.text(300), 0);
        EXPECT_TRUE(llama_memory_seq_rm(context.memory(), 0, 120, 180));
        return std::vector<Logits>{context.append(model.text(150, 300), 300)};
      },
      kMaskReason);
}

TEST(Model, ContextShift) {
  expect_like_stock(
      [] {
        const TestModel& model = TestModel::get();
        TestContext context({.size = 512});
        context.append(model.text(480), 0);
        EXPECT_TRUE(llama_memory_seq_rm(context.memory(), 0, 64, 264));
        llama_memory_seq_add(context.memory(), 0, 264, -1, -200);
        return std::vector<Logits>{context.append(model.text(150, 480), 280)};
      },
      kMaskReason);
}

TEST(Model, StateSavedAndRestored) {
  expect_like_stock([] {
    const TestModel& model = TestModel::get();
    std::vector<std::uint8_t> state;
    {
      TestContext context({.size = 512});
      context.append(model.text(300), 0);
      state.resize(llama_state_get_size(context.context()));
      EXPECT_GT(llama_state_get_data(context.context(), state.data(), state.size()), 0U);
    }
    TestContext context({.size = 512});
    EXPECT_GT(llama_state_set_data(context.context(), state.data(), state.size()), 0U);
    return std::vector<Logits>{context.append(model.text(100, 300), 300)};
  });
}

TEST(Model, PrefixReused) {
  const auto scenario = [] {
    const TestModel& model = TestModel::get();
    TestContext context({.size = 512});
    context.append(model.text(400), 0);
    EXPECT_TRUE(llama_memory_seq_rm(context.memory(), 0, 250, -1));
    return std::vector<Logits>{context.append(model.text(150, 1500), 250)};
  };
  expect_like_stock(scenario);
  // A hit must give what a miss gives.
  configure(kDenseF32);
  auto prompt = TestModel::get().text(250);
  const auto rest = TestModel::get().text(150, 1500);
  prompt.insert(prompt.end(), rest.begin(), rest.end());
  TestContext fresh({.size = 512});
  EXPECT_LE(largest_difference(fresh.append(prompt, 0), scenario()[0]), kF32Bound);
}

TEST(Model, SeveralTurns) {
  expect_like_stock([] {
    const TestModel& model = TestModel::get();
    TestContext context({.size = 768});
    std::vector<Logits> outputs;
    llama_pos pos = 0;
    for (const int length : {300, 120, 1, 1, 90}) {
      outputs.push_back(context.append(model.text(length, pos), pos));
      pos += length;
    }
    return outputs;
  });
}

TEST(Model, QuantisedCacheStaysWithLlama) {
  const auto run = [] {
    TestContext context({.size = 512, .kv_type = GGML_TYPE_Q8_0});
    return context.append(TestModel::get().text(200), 0);
  };
  configure(kStock);
  const Logits expected = run();
  nlohmann::json quiet = kSparse;
  quiet["log"] = "0";
  configure(quiet);
  EXPECT_EQ(largest_difference(run(), expected), 0.0);
  EXPECT_EQ(Host::get().calls(), 0);
  EXPECT_EQ(Host::get().stats().at("declined"), nlohmann::json::array({"K or V is quantised"}));
}

TEST(Model, DecodeStaysWithLlama) {
  configure(kDense);
  TestContext context({.size = 512});
  context.append(TestModel::get().text(200), 0);
  configure(kDense);
  context.append(TestModel::get().text(1, 200), 200);
  context.append(TestModel::get().text(63, 201), 201);
  EXPECT_EQ(Host::get().calls(), 0);
}

TEST(Model, AbortCallbackStopsAnOperation) {
  configure(kDense);
  TestContext context({.size = 512});
  std::atomic<int> asked{0};
  llama_set_abort_callback(
      context.context(), [](void* data) { return ++*static_cast<std::atomic<int>*>(data) > 40; },
      &asked);
  EXPECT_EQ(context.try_decode(entries_of(TestModel::get().text(300), 0, 0)), 2);
  EXPECT_LT(Host::get().calls(), 30);
  // The context lives on.
  llama_set_abort_callback(context.context(), nullptr, nullptr);
  llama_memory_clear(context.memory(), true);
  EXPECT_EQ(context.try_decode(entries_of(TestModel::get().text(100), 0, 0)), 0);
}

TEST(Model, TwoContextsAtOnce) {
  const auto run = [](std::size_t offset) {
    TestContext context({.size = 512, .threads = 1});
    return context.append(TestModel::get().text(300, offset), 0);
  };
  configure(kDense);
  const Logits first = run(0);
  const Logits second = run(2000);
  Logits first_again;
  std::thread other([&] { first_again = run(0); });
  const Logits second_again = run(2000);
  other.join();
  EXPECT_EQ(largest_difference(first, first_again), 0.0);
  EXPECT_EQ(largest_difference(second, second_again), 0.0);
}

TEST(Model, GuardReportsRecall) {
  nlohmann::json config = kSparse;
  config["guard"] = "report";
  configure(config);
  TestContext context({.size = 1024});
  context.append(TestModel::get().text(700), 0);
  const nlohmann::json stats = Host::get().stats();
  EXPECT_GT(stats.at("mass_recall").get<double>(), 0.5);
  EXPECT_LT(stats.at("mass_recall").get<double>(), 1.0);
  EXPECT_EQ(stats.at("layers").size(), 30U);
  EXPECT_GT(stats.at("index_seconds").get<double>(), 0.0);
}

// With chunks of 512 rows an estimate serves four of them: what is kept must stay worth as much as
// what one estimate for the whole prompt, or one for every chunk, keeps.
TEST(Model, ChunksThatShareAnEstimateKeepTheMassOfTheWholePrompt) {
  const auto prompt = TestModel::get().text(4000);
  const auto recall = [&](int ubatch, int estimate_every) {
    nlohmann::json config = kSparse;
    config["guard"] = "report";
    config["linear"] = "1";
    config["options"] = {
        {"vertical_size", 300}, {"slash_size", 500}, {"estimate_every", estimate_every}};
    configure(config);
    TestContext context({.weights = Weights::kFile, .size = 4096, .ubatch = ubatch});
    context.append(prompt, 0);
    const auto kept = Host::get().stats().at("mass_recall").get<double>();
    std::printf("  ubatch %d, estimate_every %d: recall %.4f\n", ubatch, estimate_every, kept);
    return kept;
  };
  const double whole = recall(4096, 2048);
  const double shared = recall(512, 2048);
  EXPECT_GT(whole, 0.8);
  EXPECT_GT(shared, whole - 0.02);
  EXPECT_GT(shared, recall(2048, 2048) - 0.02);
  EXPECT_GT(shared, recall(512, 1) - 0.02);
}

}  // namespace
}  // namespace minference::testing
