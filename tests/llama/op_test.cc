// One flash attention operation through ggml: the plug-in against ggml's own CPU backend, for every
// shape, type and mask that the plug-in takes; and what it declines.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml.h"
#include "llama/host.h"

namespace minference::testing {
namespace {

using Visibility = std::function<bool(std::int64_t stream, std::int64_t row, std::int64_t key)>;

bool last_rows(std::int64_t row, std::int64_t key, std::int64_t rows, std::int64_t kv_len) {
  return key <= kv_len - rows + row;
}

struct OpCase {
  std::int64_t dim = 64;
  std::int64_t v_dim = 64;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t rows = 96;
  std::int64_t keys = 768;
  std::int64_t streams = 1;
  ggml_type k_type = GGML_TYPE_F16;
  ggml_type v_type = GGML_TYPE_F16;
  float soft_cap = 0;
  float max_bias = 0;
  bool sinks = false;
  bool masked = true;
  bool shared_mask = false;  // one mask for all streams
  Visibility sees = [](auto, auto row, auto key) { return last_rows(row, key, 96, 700); };
};

class Backend {
 public:
  explicit Backend(ggml_backend_dev_t device)
      : backend_(ggml_backend_dev_init(device, nullptr), ggml_backend_free) {}
  ggml_status compute(ggml_cgraph* graph) const {
    return ggml_backend_graph_compute(backend_.get(), graph);
  }

 private:
  std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> backend_;
};

// The operation as llama.cpp builds it: Q permuted, K and V views of a cache that is longer.
class Operation {
 public:
  explicit Operation(const OpCase& c) : case_(c) {
    ggml_init_params params{ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true};
    context_.reset(ggml_init(params));
    ggml_context* ctx = context_.get();
    q_ = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.dim, c.heads, c.rows, c.streams);
    const std::int64_t cells = c.keys + 64;
    k_ = ggml_new_tensor_3d(ctx, c.k_type, c.dim * c.kv_heads, cells, c.streams);
    v_ = ggml_new_tensor_3d(ctx, c.v_type, c.v_dim * c.kv_heads, cells, c.streams);
    ggml_set_name(k_, "cache_k_l3");
    if (c.masked) {
      mask_ =
          ggml_new_tensor_4d(ctx, GGML_TYPE_F16, c.keys, c.rows, 1, c.shared_mask ? 1 : c.streams);
    }
    op_ = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q_, 0, 2, 1, 3), cache_view(k_, c.dim),
                              cache_view(v_, c.v_dim), mask_,
                              1.0F / std::sqrt(static_cast<float>(c.dim)), c.max_bias, c.soft_cap);
    if (c.sinks) {
      sinks_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.heads);
      ggml_flash_attn_ext_add_sinks(op_, sinks_);
    }
  }

  const ggml_tensor* op() const { return op_; }
  ggml_tensor* mask() { return mask_; }

  void fill() {
    buffer_.reset(
        ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_cpu_buffer_type()));
    std::mt19937 random(11);
    for (ggml_tensor* t : {q_, k_, v_, sinks_}) {
      if (t != nullptr) fill_normal(t, random);
    }
    if (mask_ != nullptr) fill_mask(case_.sees);
  }

  void fill_mask(const Visibility& sees) {
    auto* data = static_cast<ggml_fp16_t*>(mask_->data);
    for (std::int64_t s = 0; s < mask_->ne[3]; ++s) {
      for (std::int64_t i = 0; i < mask_->ne[1]; ++i) {
        for (std::int64_t j = 0; j < mask_->ne[0]; ++j) {
          *data++ = ggml_fp32_to_fp16(sees(s, i, j) ? 0.0F : -INFINITY);
        }
      }
    }
  }

  ggml_status compute(ggml_backend_dev_t device, std::vector<float>& out) {
    return compute(Backend(device), out);
  }

  // On a backend that lives longer, as that of a llama_context does.
  ggml_status compute(const Backend& backend, std::vector<float>& out) {
    ggml_cgraph* graph = ggml_new_graph_custom(graph_context(), 32, false);
    ggml_build_forward_expand(graph, op_);
    std::memset(op_->data, 0xFF, ggml_nbytes(op_));  // NaN where nothing is written
    const ggml_status status = backend.compute(graph);
    out.assign(static_cast<const float*>(op_->data),
               static_cast<const float*>(op_->data) + ggml_nelements(op_));
    return status;
  }

 private:
  struct Free {
    void operator()(ggml_context* c) const { ggml_free(c); }
    void operator()(ggml_backend_buffer* b) const { ggml_backend_buffer_free(b); }
  };

  ggml_tensor* cache_view(ggml_tensor* cache, std::int64_t dim) {
    ggml_context* ctx = context_.get();
    ggml_tensor* view =
        ggml_view_4d(ctx, cache, dim, case_.kv_heads, case_.keys, case_.streams,
                     ggml_row_size(cache->type, dim), cache->nb[1], cache->nb[2], 0);
    return ggml_permute(ctx, view, 0, 2, 1, 3);
  }

  ggml_context* graph_context() {
    ggml_init_params params{ggml_graph_overhead_custom(32, false) + 1024, nullptr, true};
    graph_.reset(ggml_init(params));
    return graph_.get();
  }

  static void fill_normal(ggml_tensor* t, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(t)));
    for (float& value : values) value = normal(random);
    if (t->type == GGML_TYPE_F32) {
      std::memcpy(t->data, values.data(), values.size() * sizeof(float));
    } else if (t->type == GGML_TYPE_BF16) {
      ggml_fp32_to_bf16_row(values.data(), static_cast<ggml_bf16_t*>(t->data), values.size());
    } else {
      ggml_fp32_to_fp16_row(values.data(), static_cast<ggml_fp16_t*>(t->data), values.size());
    }
  }

  OpCase case_;
  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_context, Free> graph_;
  std::unique_ptr<ggml_backend_buffer, Free> buffer_;
  ggml_tensor* q_ = nullptr;
  ggml_tensor* k_ = nullptr;
  ggml_tensor* v_ = nullptr;
  ggml_tensor* mask_ = nullptr;
  ggml_tensor* sinks_ = nullptr;
  ggml_tensor* op_ = nullptr;
};

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;
    if (std::isnan(difference)) return difference;
  }
  return largest;
}

// Outputs are averages of values of unit variance. With f32 products the two differ by rounding
// of the sums only, with f16 K and V read exactly by both. With bf16 products our inputs and
// probabilities, and for bf16 K ggml's queries, are rounded to 8 bits.
constexpr double kF32Bound = 1e-4;
constexpr double kBf16Bound = 4e-2;

void expect_like_ggml(const OpCase& c, const std::string& precision = "f32") {
  Host& host = Host::get();
  ASSERT_EQ(host.configure({{"attn", "dense"}, {"precision", precision}}), "");
  Operation operation(c);
  ASSERT_TRUE(ggml_backend_dev_supports_op(host.plugin_device(), operation.op()));
  operation.fill();
  std::vector<float> expected;
  std::vector<float> actual;
  ASSERT_EQ(operation.compute(host.cpu_device(), expected), GGML_STATUS_SUCCESS);
  ASSERT_EQ(operation.compute(host.plugin_device(), actual), GGML_STATUS_SUCCESS);
  const bool f32 = precision == "f32" && c.k_type != GGML_TYPE_BF16;
  EXPECT_LE(largest_difference(expected, actual), f32 ? kF32Bound : kBf16Bound);
  EXPECT_EQ(host.calls(), 1);
  EXPECT_EQ(host.stats().at("layers").at(0).at("layer"), 3);
}

TEST(Operation, HeadDimensionsAndGroups) {
  for (const std::int64_t dim : {32, 40, 64, 80, 96, 128, 192, 256}) {
    OpCase c;
    c.dim = c.v_dim = dim;
    SCOPED_TRACE(dim);
    expect_like_ggml(c);
    expect_like_ggml(c, "auto");
  }
  OpCase c;
  c.dim = 192;
  c.v_dim = 128;
  expect_like_ggml(c);
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {9, 3}, {14, 2}, {8, 1}, {6, 6}}) {
    c = OpCase{};
    c.heads = heads;
    c.kv_heads = kv_heads;
    SCOPED_TRACE(heads);
    expect_like_ggml(c);
  }
}

TEST(Operation, TypesOfKeysAndValues) {
  for (const ggml_type k : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32}) {
    for (const ggml_type v : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32}) {
      OpCase c;
      c.k_type = k;
      c.v_type = v;
      SCOPED_TRACE(std::string(ggml_type_name(k)) + " " + ggml_type_name(v));
      expect_like_ggml(c, "auto");
    }
  }
}

TEST(Operation, SoftCapAndSinks) {
  OpCase c;
  c.soft_cap = 2.0F;
  expect_like_ggml(c);
  c.soft_cap = 0;
  c.sinks = true;
  expect_like_ggml(c);
  c.soft_cap = 5.0F;
  expect_like_ggml(c, "auto");
}

TEST(Operation, MasksOfEveryKind) {
  const std::pair<const char*, Visibility> masks[] = {
      {"first prefill", [](auto, auto i, auto j) { return j <= i; }},
      {"everything", [](auto, auto, auto) { return true; }},
      {"two sequences",
       [](auto, auto i, auto j) {
         return i < 40 ? j <= 100 + i : j >= 140 && j <= 340 + (i - 40);
       }},
      {"interleaved", [](auto, auto i, auto j) { return j <= 2 * i + 1 && j % 2 == i % 2; }},
      {"removed range", [](auto, auto i, auto j) { return j <= 500 + i && (j < 99 || j > 301); }},
      {"window", [](auto, auto i, auto j) { return j <= 500 + i && j > 470 + i; }},
      {"some rows see nothing", [](auto, auto i, auto j) { return i % 3 != 0 && j <= 200 + i; }},
      {"nothing at all", [](auto, auto, auto) { return false; }},
      {"decoding rows first", [](auto, auto i, auto j) {
         return i < 3 ? j >= 150 * i && j < 150 * i + 99 : j >= 450 && j <= 550 + i;
       }}};
  for (const auto& [name, sees] : masks) {
    SCOPED_TRACE(name);
    OpCase c;
    c.sees = sees;
    expect_like_ggml(c);
    c.sinks = true;
    expect_like_ggml(c);
  }
}

TEST(Operation, NoMaskIsBidirectional) {
  OpCase c;
  c.masked = false;
  expect_like_ggml(c);
}

TEST(Operation, StreamsHaveTheirOwnMasks) {
  OpCase c;
  c.streams = 3;
  c.sees = [](auto s, auto i, auto j) {
    return s == 2 ? j <= i && j % 3 != 1 : last_rows(i, j, 96, 300 + 200 * s);
  };
  expect_like_ggml(c);
  c.shared_mask = true;
  expect_like_ggml(c);
}

TEST(Operation, RowsAndKeysOfEverySize) {
  for (const std::int64_t rows : {64, 65, 100, 127, 128, 300}) {
    for (const std::int64_t keys : {512, 513, 768}) {
      OpCase c;
      c.rows = rows;
      c.keys = keys;
      c.sees = [=](auto, auto i, auto j) { return last_rows(i, j, rows, keys - 3); };
      SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(keys) + " keys");
      expect_like_ggml(c);
    }
  }
}

// A budget that covers everything gives dense attention; a mask that is no prefix gives exact
// attention and says so.
TEST(Operation, SparseMethodFallsBackAndSaysSo) {
  Host& host = Host::get();
  const nlohmann::json sparse = {
      {"attn", "a_shape"}, {"options", {{"n_init", 16}, {"n_local", 64}}}, {"precision", "f32"}};
  ASSERT_EQ(host.configure(sparse), "");
  std::vector<float> expected;
  std::vector<float> actual;
  Operation prefix{OpCase{}};
  prefix.fill();
  ASSERT_EQ(prefix.compute(host.cpu_device(), expected), GGML_STATUS_SUCCESS);
  ASSERT_EQ(prefix.compute(host.plugin_device(), actual), GGML_STATUS_SUCCESS);
  EXPECT_GT(largest_difference(expected, actual), 1e-2);
  EXPECT_TRUE(host.stats().at("fallbacks").empty());
  EXPECT_LT(host.stats().at("kept_pairs").get<double>(),
            0.3 * host.stats().at("causal_pairs").get<double>());

  OpCase c;
  c.sees = [](auto, auto i, auto j) { return j <= 500 + i && j != 7; };
  Operation holes(c);
  holes.fill();
  ASSERT_EQ(host.configure(sparse), "");
  ASSERT_EQ(holes.compute(host.cpu_device(), expected), GGML_STATUS_SUCCESS);
  ASSERT_EQ(holes.compute(host.plugin_device(), actual), GGML_STATUS_SUCCESS);
  EXPECT_LE(largest_difference(expected, actual), kF32Bound);
  EXPECT_EQ(host.fallbacks("mask is not a causal prefix"), 1);
}

// The last rows of a prompt are dense, as many of them as lie in this batch; without a hint, or
// where sequences share the batch, those of each sequence of it.
TEST(Operation, LastRowsAreThePromptsWhereTheHostSaysHowManyFollow) {
  Host& host = Host::get();
  const nlohmann::json config = {{"attn", "tri_shape"},
                                 {"options", {{"n_init", 16}, {"n_local", 64}, {"n_last", 32}}},
                                 {"precision", "f32"}};
  constexpr std::int64_t kRows = 96;
  // Kept pairs of rows at positions first ... first + rows - 1 of which the last `dense` see all.
  const auto kept = [](std::int64_t first, std::int64_t rows, std::int64_t dense) {
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < rows; ++i) pairs += i < rows - dense ? 80 : first + i + 1;
    return 4 * pairs;
  };
  const auto measured = [&](Operation& operation, std::int64_t rows_after) {
    EXPECT_EQ(host.configure(config), "");
    host.set_rows_after(rows_after);
    std::vector<float> out;
    EXPECT_EQ(operation.compute(host.plugin_device(), out), GGML_STATUS_SUCCESS);
    host.set_rows_after(0);
    return host.stats().at("kept_pairs").get<std::int64_t>();
  };
  Operation one{OpCase{}};
  one.fill();
  EXPECT_EQ(measured(one, 0), kept(604, kRows, 32));
  EXPECT_EQ(measured(one, 10), kept(604, kRows, 22));
  EXPECT_EQ(measured(one, 31), kept(604, kRows, 1));
  EXPECT_EQ(measured(one, 32), kept(604, kRows, 0));
  EXPECT_EQ(measured(one, 100000), kept(604, kRows, 0));

  OpCase c;
  c.rows = 2 * kRows;
  c.sees = [](auto, auto i, auto j) {
    return i < kRows ? j <= 200 + i : j >= 296 && j <= 496 + (i - kRows);
  };
  Operation two(c);
  two.fill();
  nlohmann::json small = config;
  small["min_kv"] = 1;
  ASSERT_EQ(host.configure(small), "");
  host.set_rows_after(100000);
  std::vector<float> out;
  EXPECT_EQ(two.compute(host.plugin_device(), out), GGML_STATUS_SUCCESS);
  host.set_rows_after(0);
  EXPECT_EQ(host.stats().at("kept_pairs").get<std::int64_t>(), 2 * kept(200, kRows, 32));
}

// Chunks of 96 rows of sequences that begin at any cell, computed by the method static.
class StaticChunks : public ::testing::Test {
 protected:
  void SetUp() override {
    configure();
    operation_.fill();
  }

  static void configure() {
    ASSERT_EQ(Host::get().configure({{"attn", "static"},
                                     {"options", {{"vertical_size", 40}, {"slash_size", 101}}},
                                     {"precision", "f32"}}),
              "");
  }
  static OpCase shape() {
    OpCase c;
    c.keys = 4096;
    return c;
  }

  std::vector<float> run(const Backend& backend, std::int64_t key_begin, std::int64_t key_end) {
    operation_.fill_mask([=](auto, auto i, auto j) {
      return j >= key_begin && last_rows(i, j, shape().rows, key_end);
    });
    std::vector<float> out;
    EXPECT_EQ(operation_.compute(backend, out), GGML_STATUS_SUCCESS);
    return out;
  }
  // By a backend that knows no earlier chunk.
  std::vector<float> run_alone(std::int64_t key_begin, std::int64_t key_end) {
    return run(Backend(Host::get().plugin_device()), key_begin, key_end);
  }

  Operation operation_{shape()};
};

// A backend, which belongs to one llama_context, remembers what was estimated from a sequence's
// first chunk; another backend, another sequence and another configuration do not know it.
TEST_F(StaticChunks, SetsLiveAsLongAsTheirSequence) {
  const std::vector<float> alone = run_alone(0, 4000);
  const std::vector<float> other = run_alone(700, 4000);
  const Backend backend(Host::get().plugin_device());
  EXPECT_EQ(run(backend, 0, 3000), run_alone(0, 3000));
  const std::vector<float> continued = run(backend, 0, 4000);
  EXPECT_GT(largest_difference(alone, continued), 1e-3);
  EXPECT_EQ(run(backend, 700, 4000), other);
  EXPECT_EQ(run(backend, 0, 4000), continued);
  // Rows from before the end of what was estimated: the cache was rewound to another prompt.
  EXPECT_EQ(run(backend, 0, 2990), run_alone(0, 2990));
  EXPECT_TRUE(Host::get().stats().at("fallbacks").empty());
  configure();
  EXPECT_EQ(run(backend, 0, 4000), alone);
}

// Of each layer a bounded number of sequences is kept, those that were used last.
TEST_F(StaticChunks, SequencesThatWereUsedLongestAgoAreForgotten) {
  const std::vector<float> alone = run_alone(0, 4000);
  const Backend backend(Host::get().plugin_device());
  run(backend, 0, 3000);
  const std::vector<float> continued = run(backend, 0, 4000);
  ASSERT_NE(continued, alone);
  for (std::int64_t begin = 1; begin < 16; ++begin) run(backend, begin, 3000);
  EXPECT_EQ(run(backend, 0, 4000), continued);
  for (std::int64_t begin = 1; begin <= 16; ++begin) run(backend, begin, 3000);
  EXPECT_EQ(run(backend, 0, 4000), alone);
}

TEST(Operation, StrangeMaskValueFailsAloud) {
  Host& host = Host::get();
  ASSERT_EQ(host.configure({{"attn", "dense"}}), "");
  Operation operation{OpCase{}};
  operation.fill();
  static_cast<ggml_fp16_t*>(operation.mask()->data)[768 * 5 + 9] = ggml_fp32_to_fp16(-1.5F);
  std::vector<float> out;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(operation.compute(host.plugin_device(), out), GGML_STATUS_FAILED);
  const std::string message = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("-1.5"), std::string::npos) << message;
  EXPECT_NE(message.find("row 5, key 9"), std::string::npos) << message;
}

TEST(Operation, Declines) {
  Host& host = Host::get();
  const auto supported = [&](const OpCase& c) {
    return ggml_backend_dev_supports_op(host.plugin_device(), Operation(c).op());
  };
  ASSERT_EQ(host.configure({{"attn", "dense"}, {"log", "0"}}), "");
  OpCase c;
  EXPECT_TRUE(supported(c));
  c.rows = 63;
  EXPECT_FALSE(supported(c));
  c = OpCase{};
  c.keys = 511;
  EXPECT_FALSE(supported(c));
  c = OpCase{};
  c.dim = c.v_dim = 288;
  EXPECT_FALSE(supported(c));
  c = OpCase{};
  c.k_type = GGML_TYPE_Q8_0;
  EXPECT_FALSE(supported(c));
  c = OpCase{};
  c.v_type = GGML_TYPE_Q4_0;
  EXPECT_FALSE(supported(c));
  c = OpCase{};
  c.max_bias = 8.0F;
  EXPECT_FALSE(supported(c));
  const nlohmann::json declined = host.stats().at("declined");
  EXPECT_EQ(declined.size(), 3U) << declined;
  ASSERT_EQ(host.configure({{"attn", "dense"}, {"min_rows", 128}}), "");
  EXPECT_FALSE(supported(OpCase{}));
  ASSERT_EQ(host.configure({{"attn", "dense"}, {"min_kv", 1024}}), "");
  EXPECT_FALSE(supported(OpCase{}));
  ASSERT_EQ(host.configure({{"attn", "stock"}}), "");
  EXPECT_FALSE(supported(OpCase{}));
}

TEST(Operation, PatternFileForAnotherModelFailsAloud) {
  Host& host = Host::get();
  // Four layers of two heads; the operation has four heads in layer 3.
  const std::string path = ::testing::TempDir() + "minference_op_test_pattern.json";
  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fputs(R"([{"0":["vertical_and_slash",30,100,1],"1":["vertical_and_slash",30,100,1]},
                 {"0":["stream_llm",30,100,1]},{"0":["stream_llm",30,100,1]},
                 {"1":["stream_llm",30,100,1]}])",
             file);
  std::fclose(file);
  ASSERT_EQ(host.configure({{"attn", "minference"}, {"pattern", path}}), "");
  Operation operation{OpCase{}};
  operation.fill();
  std::vector<float> out;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(operation.compute(host.plugin_device(), out), GGML_STATUS_FAILED);
  const std::string message = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("2 heads"), std::string::npos) << message;
  std::remove(path.c_str());
}

TEST(Plugin, LoadingTwiceRegistersOnce) {
  Host& host = Host::get();
  const std::size_t devices = ggml_backend_dev_count();
  EXPECT_NE(ggml_backend_load(MINFERENCE_TEST_BIN_DIR "/libggml-minference.so"), nullptr);
  EXPECT_EQ(ggml_backend_dev_count(), devices);
  EXPECT_EQ(ggml_backend_dev_type(host.plugin_device()), GGML_BACKEND_DEVICE_TYPE_ACCEL);
  EXPECT_EQ(ggml_backend_dev_buffer_type(host.plugin_device()), ggml_backend_cpu_buffer_type());
}

TEST(Plugin, RefusedConfigurationChangesNothing) {
  Host& host = Host::get();
  ASSERT_EQ(host.configure({{"attn", "dense"}, {"min_kv", 1024}}), "");
  EXPECT_NE(host.configure({{"attn", "no_such_method"}}), "");
  EXPECT_FALSE(ggml_backend_dev_supports_op(host.plugin_device(), Operation(OpCase{}).op()));
}

}  // namespace
}  // namespace minference::testing
