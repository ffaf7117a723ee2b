// auto on the device: the estimate's masses against the CPU's, and what the heads keep of the sampled
// rows' mass.
#include <mutex>

#include "attention/kept_pairs.h"
#include "attention/visible_keys.h"
#include "index/coverage.h"
#include "index/coverage_rule.h"
#include "index/cuda/coverage.h"
#include "index_support.h"
#include "methods/method_table.h"
#include "minference/method.h"

namespace minference::cuda_test {
namespace {

int failures = 0;

// What the rows have of the mass beyond the sinks, of one head, and what the index keeps of it.
struct Mass {
  double total = 0;
  double kept = 0;

  double loss() const { return total > 0 ? 1 - kept / total : 0.0; }
};

class Reader {
 public:
  explicit Reader(const TensorView& view) : view_(view) {}
  double at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const {
    const std::int64_t place =
        b * view_.strides[0] + t * view_.strides[1] + h * view_.strides[2] + d * view_.strides[3];
    if (view_.dtype == DType::kF32) return static_cast<const float*>(view_.data)[place];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(view_.data)[place];
    return view_.dtype == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }

 private:
  const TensorView& view_;
};

// Exact softmax, in fp64, of rows that lie so far behind those that the estimate looks at.
Mass mass_of(const Inputs& inputs, const SparseIndex& index, std::int64_t b, std::int64_t h,
             int behind) {
  const AttentionInput& input = inputs.input;
  const SequenceGeometry geometry(input, inputs.params, b);
  const Reader q(input.q);
  const Reader k(input.k);
  const std::int64_t kv_head = h / (input.q.heads() / input.k.heads());
  const double scale = inputs.problem.scale;
  const double cap = inputs.problem.soft_cap;
  Mass mass;
  std::vector<double> scores(geometry.kv_len);
  std::vector<std::uint64_t> bits(geometry.kv_len / 64 + 2);
  VisibleKeys visible;
  for (int slot = 0; slot < cuda::kPassRows; ++slot) {
    int row = cuda::spread_row(static_cast<int>(geometry.q_len), cuda::kPassRows, slot);
    if (row < 0) continue;
    row = std::min(row + behind, static_cast<int>(geometry.q_len) - 1);
    const std::int64_t first = geometry.first_key(row);
    const std::int64_t end = geometry.end_key(row);
    double highest = -INFINITY;
    for (std::int64_t key = first; key < end; ++key) {
      const std::int64_t page = inputs.problem.page_size;
      const std::int64_t kb =
          page > 0 ? input.block_table[b * input.pages_per_sequence + key / page] : b;
      const std::int64_t kt = page > 0 ? key % page : key;
      double score = 0;
      for (std::int64_t d = 0; d < input.q.dim(); ++d) {
        score += q.at(b, row, h, d) * k.at(kb, kt, kv_head, d);
      }
      score *= scale;
      if (cap > 0) score = cap * std::tanh(score / cap);
      scores[key] = score;
      highest = std::max(highest, score);
    }
    double sum = 0;
    for (std::int64_t key = first; key < end; ++key) sum += std::exp(scores[key] - highest);
    std::fill(bits.begin(), bits.end(), 0);
    visible.mark_row(geometry, &index.head(b, h), row, bits.data());
    for (std::int64_t key = std::max<std::int64_t>(first, MassTable::kSinks); key < end; ++key) {
      const double p = std::exp(scores[key] - highest) / sum;
      mass.total += p;
      if ((bits[key / 64] >> (key % 64) & 1) != 0) mass.kept += p;
    }
  }
  return mass;
}

double kept_fraction(const Inputs& inputs, const SparseIndex& index) {
  double kept = 0;
  double all = 0;
  for (const std::int64_t pairs : kept_pairs(inputs.input, inputs.params, &index)) kept += pairs;
  for (const std::int64_t pairs : kept_pairs(inputs.input, inputs.params, nullptr)) all += pairs;
  return kept / all;
}

// Of all pairs.
struct Expected {
  double least_kept = 0;
  double most_kept = 1;
};

void check_case(const Shape& shape, const Fill& values, const CoverageRule& rule,
                const Expected& expected) {
  const Fill fill = [&](bool is_key, int b, int t, int h, int d) {
    const auto& lens = is_key ? shape.kv_lens : shape.q_lens;
    if (!lens.empty() && t >= lens[b]) return NAN;
    return values(is_key, b, t, h, d);
  };
  const Inputs inputs(shape, fill);
  cuda::BoxCosts costs = cuda::box_costs(inputs.problem, false);
  costs.estimate_rows = 0;
  costs.least_keys = 0;
  const std::int64_t bytes = cuda::coverage_index_bytes(inputs.problem, rule);
  const DeviceArray<char> memory(bytes);
  REQUIRE_CUDA(cudaMemset(memory.get(), 0xFF, bytes));
  bool same = true;
  // Not known for one sequence; among several, the first ends here and others go on.
  std::vector<std::int64_t> after(shape.batch > 1 ? shape.batch : 0, 1);
  if (!after.empty()) after[0] = 0;
  const SparseIndex got = build_three_times(
      inputs.problem, (shape.q_tokens + kRowBlock - 1) / kRowBlock,
      [&](cudaStream_t stream) {
        return cuda::build_coverage_index(inputs.problem, rule, after, costs, {memory.get(), bytes},
                                          stream);
      },
      same);
  std::string error;
  try {
    validate(got, shape.batch, shape.q_heads, shape.q_tokens, shape.kv_tokens);
  } catch (const std::exception& e) {
    error = e.what();
  }
  int sparse = 0;
  bool same_rows = true;       // of exact attention, at the ends
  double worst = 0;            // loss of a sequence beyond what it may lose
  double worst_of_others = 0;  // in rows that the estimate has not seen
  double mean = 0;
  int sequences = 0;
  for (int b = 0; b < shape.batch && error.empty(); ++b) {
    const SequenceGeometry geometry(inputs.input, inputs.params, b);
    if (geometry.q_len == 0) continue;
    double lost = 0;
    double lost_of_others = 0;
    const std::int64_t exact_rows = std::min(
        exact_last_rows(rule, geometry.q_len, after.empty() ? -1 : after[b]), geometry.q_len);
    for (int h = 0; h < shape.q_heads; ++h) {
      if (got.head(b, h).kind == HeadIndex::Kind::kDense) continue;
      ++sparse;
      same_rows &= got.head(b, h).dense_last_rows == exact_rows;
      lost += mass_of(inputs, got, b, h, 0).loss() / shape.q_heads;
      lost_of_others += mass_of(inputs, got, b, h, 11).loss() / shape.q_heads;
    }
    const double allowed = allowed_loss(rule, geometry.kv_len);
    worst = std::max(worst, lost - allowed);
    worst_of_others = std::max(worst_of_others, lost_of_others - allowed);
    mean += lost;
    ++sequences;
  }
  const SparseIndex on_cpu = auto_method().build_index(
      inputs.input, inputs.params,
      resolve_options(auto_method(), {{"coverage", rule.coverage},
                                      {"long_keys", rule.long_keys},
                                      {"estimate_rows", static_cast<double>(rule.rows)},
                                      {"min_keys", static_cast<double>(rule.min_keys)},
                                      {"max_cost", rule.max_cost},
                                      {"last_rows", static_cast<double>(rule.last_rows)}}),
      {});
  const double kept = error.empty() ? kept_fraction(inputs, got) : 0.0;
  const bool ok = error.empty() && same && same_rows && worst < 0.003 && worst_of_others < 0.03 &&
                  kept >= expected.least_kept && kept <= expected.most_kept;
  if (!ok) ++failures;
  std::printf(
      "%-4s %-24s sparse %3d/%-3zu lost %.4f (over %+.4f, unseen %+.4f) kept %.4f CPU %.4f%s%s "
      "%s\n",
      ok ? "ok" : "FAIL", shape.name.c_str(), sparse, got.heads.size(),
      mean / std::max(sequences, 1), worst, worst_of_others, kept, kept_fraction(inputs, on_cpu),
      same ? "" : " NOT THE SAME EVERY TIME", same_rows ? "" : " OTHER LAST ROWS", error.c_str());
}

// The masses of all heads by box, and their columns, against the CPU's estimate.
void check_masses(const Shape& shape, const Fill& fill, int rows) {
  const Inputs inputs(shape, fill);
  const cuda::Problem& problem = inputs.problem;
  const std::size_t heads = static_cast<std::size_t>(shape.batch) * shape.q_heads;
  const cuda::CoveragePlan plan = cuda::plan_coverage(problem, rows);
  cuda::MemoryPieces counted;
  cuda::allocate(problem, plan, counted);
  const DeviceArray<char> memory(counted.used());
  REQUIRE_CUDA(cudaMemset(memory.get(), 0xFF, counted.used()));
  cuda::MemoryPieces given(memory.get());
  const cuda::CoverageTables tables = cuda::allocate(problem, plan, given);
  const DeviceArray<std::uint8_t> wanted(std::vector<std::uint8_t>(heads, 1));
  cuda::estimate_coverage(problem, plan, wanted.get(), tables, nullptr);
  REQUIRE_CUDA(cudaDeviceSynchronize());
  const auto masses =
      to_host(tables.by_distance, heads * cuda::kHalves * cuda::kMassClasses * plan.distances);
  const auto classes = to_host(tables.classes, heads * plan.class_bytes);
  const auto keys_of_class = to_host(tables.keys_of_class, heads * cuda::kMassClasses);

  double error = 0;
  double total = 0;
  std::int64_t columns = 0;
  std::int64_t differ = 0;
  std::int64_t counted_columns = 0;
  const std::vector<std::uint8_t> all(heads, 1);
  std::mutex mutex;  // several heads at a time
  const auto compare_head = [&](const MassTable& table) {
    const std::lock_guard<std::mutex> lock(mutex);
    const std::size_t head = table.b * shape.q_heads + table.h;
    for (std::int64_t d = 0; 2 * d - 1 + table.width - 1 < table.distances; ++d) {
      double mass = 0;
      for (int c = 0; c < MassTable::kClasses; ++c) {
        for (const std::int64_t at : {2 * d + table.width - 1, 2 * d + table.width - 2}) {
          if (at < table.distances) mass += table.of_class(c)[at];
        }
      }
      std::uint64_t units = 0;
      for (int i = 0; i < cuda::kHalves * cuda::kMassClasses; ++i) {
        units += masses[(head * cuda::kHalves * cuda::kMassClasses + i) * plan.distances + d];
      }
      error += std::abs(mass - static_cast<double>(units) * cuda::kMassUnit);
      total += mass;
    }
    std::vector<int> expected(table.kv_len, 0);
    for (const MassTable::Column& column : table.columns) {
      expected[column.key] = std::min(column.weight_class, cuda::kMassClasses - 1);
    }
    for (std::int64_t key = 0; key < table.kv_len; ++key) {
      const std::uint8_t byte = classes[head * plan.class_bytes + key / 16 * 8 + key % 8];
      const int got = key % 16 < 8 ? byte & 15 : byte >> 4;
      columns += expected[key] > 0 ? 1 : 0;
      differ += expected[key] != got ? 1 : 0;
    }
    for (int c = 1; c < cuda::kMassClasses; ++c) {
      counted_columns += keys_of_class[head * cuda::kMassClasses + c];
    }
  };
  estimate_coverage(inputs.input, inputs.params, rows, all, compare_head);
  // With a window the first keys are columns that no row sees, which the CPU does not look at.
  const std::int64_t first_keys =
      shape.window > 0 ? kRunGranule * static_cast<std::int64_t>(heads) : 0;
  const bool ok = error < 1e-4 * total && differ - first_keys <= columns / 50 &&
                  std::abs(counted_columns - columns) <= differ;
  if (!ok) ++failures;
  std::printf(
      "%-4s masses %-20s total %.2f of %zu rows, differ by %.2e; columns %lld, counted %lld, other "
      "class %lld\n",
      ok ? "ok" : "FAIL", shape.name.c_str(), total, heads * rows, error / total,
      static_cast<long long>(columns), static_cast<long long>(counted_columns),
      static_cast<long long>(differ));
}

// All mass lies at a few keys, and with some heads at a few distances as well.
Fill planted(int heads_with_distances) {
  return [=](bool is_key, int, int t, int h, int d) {
    const float noise = (hashed(3, is_key ? 1 : 0, t, h, d) - 0.5F) * 0.2F;
    if (d == 0) return is_key ? (t % 701 == 350 ? 12.0F : 0.0F) : 8.0F;
    // Rows look for the keys 640 before them: directions that turn with the position.
    if (h < heads_with_distances && d < 33) {
      const float angle = static_cast<float>(is_key ? t : t - 640) *
                          static_cast<float>(std::pow(2000.0, -((d - 1) / 2) / 16.0));
      return 6 * (d % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
    return noise;
  };
}

void check_all() {
  CoverageRule rule;
  rule.last_rows = 64;
  rule.coverage = 0.95;
  rule.long_keys = 1;
  rule.rows = 64;
  rule.min_keys = 0;
  rule.max_cost = 0.95;
  for (const int dim : {64, 128, 256}) {
    const Shape shape{.name = "dim " + std::to_string(dim),
                      .q_tokens = 3008,
                      .kv_tokens = 4032,
                      .q_heads = 8,
                      .kv_heads = 2,
                      .dim = dim,
                      .dtype = dim == 64 ? DType::kF16 : DType::kBF16};
    check_masses(shape, random_fill(7, dim), 64);
    check_masses(shape, planted(1), 48);
  }
  check_masses({.name = "window, cap",
                .q_tokens = 640,
                .kv_tokens = 4032,
                .q_heads = 3,
                .kv_heads = 1,
                .window = 900,
                .soft_cap = 20,
                .scale = 0.3F},
               random_fill(8, 64), 64);
  const Expected sparse{.most_kept = 0.6};
  check_case({.name = "planted columns",
              .q_tokens = 6000,
              .kv_tokens = 6000,
              .q_heads = 4,
              .kv_heads = 2,
              .dim = 64},
             planted(0), rule, {.most_kept = 0.12});
  check_case({.name = "planted distances",
              .q_tokens = 6000,
              .kv_tokens = 6000,
              .q_heads = 4,
              .kv_heads = 2,
              .dim = 64},
             planted(2), rule, {.most_kept = 0.2});
  const auto random_case = [&](const Shape& shape, const Expected& expected) {
    check_case(shape, random_fill(7, shape.dim), rule, expected);
  };
  random_case({.name = "gqa 4",
               .q_tokens = 9000,
               .kv_tokens = 9000,
               .q_heads = 8,
               .kv_heads = 2,
               .dim = 128},
              {});
  random_case({.name = "mha", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 3, .kv_heads = 3},
              {});
  random_case({.name = "gqa 7 f16",
               .q_tokens = 2500,
               .kv_tokens = 6000,
               .q_heads = 14,
               .kv_heads = 2,
               .dtype = DType::kF16},
              {});
  random_case({.name = "f32",
               .q_tokens = 3000,
               .kv_tokens = 3000,
               .q_heads = 4,
               .kv_heads = 2,
               .dtype = DType::kF32},
              {});
  random_case({.name = "chunk at an odd place",
               .q_tokens = 2049,
               .kv_tokens = 8111,
               .q_heads = 4,
               .kv_heads = 2,
               .dim = 128},
              {});
  random_case({.name = "few rows", .q_tokens = 17, .kv_tokens = 5000, .q_heads = 2, .kv_heads = 1},
              {});
  random_case({.name = "dim 200",
               .q_tokens = 700,
               .kv_tokens = 5000,
               .q_heads = 2,
               .kv_heads = 1,
               .dim = 200},
              {});
  random_case({.name = "ragged",
               .batch = 5,
               .q_tokens = 2100,
               .kv_tokens = 6000,
               .q_heads = 4,
               .kv_heads = 2,
               .q_lens = {2100, 70, 640, 0, 1500},
               .kv_lens = {6000, 4900, 3640, 2000, 1500}},
              {});
  random_case({.name = "window",
               .q_tokens = 1600,
               .kv_tokens = 6000,
               .q_heads = 2,
               .kv_heads = 1,
               .window = 2500},
              {});
  random_case({.name = "soft cap",
               .q_tokens = 1600,
               .kv_tokens = 6000,
               .q_heads = 2,
               .kv_heads = 1,
               .soft_cap = 20,
               .scale = 0.3F},
              {});
  random_case({.name = "more rows than keys",
               .q_tokens = 900,
               .kv_tokens = 600,
               .q_heads = 2,
               .kv_heads = 1},
              {.least_kept = 1});
  for (const Shape& shape : storage_shapes(1600, 5000)) random_case(shape, {});
  CoverageRule other = rule;
  other.coverage = 0.7;
  check_case(
      {.name = "coverage 0.7", .q_tokens = 5000, .kv_tokens = 5000, .q_heads = 4, .kv_heads = 2},
      random_fill(7, 64), other, sparse);
  other.coverage = 1;
  check_case(
      {.name = "coverage 1", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 4, .kv_heads = 2},
      random_fill(7, 64), other, {.least_kept = 1});
  other.coverage = 0;
  check_case(
      {.name = "coverage 0", .q_tokens = 3000, .kv_tokens = 3000, .q_heads = 4, .kv_heads = 2},
      random_fill(7, 64), other, {.most_kept = 0.2});
  other = rule;
  other.min_keys = 4000;
  check_case({.name = "min_keys",
              .batch = 2,
              .q_tokens = 3000,
              .kv_tokens = 6000,
              .q_heads = 2,
              .kv_heads = 2,
              .q_lens = {3000, 3000},
              .kv_lens = {6000, 3000}},
             random_fill(7, 64), other, {});
}

void time_all() {
  CoverageRule rule;
  rule.coverage = 0.95;
  rule.long_keys = 20480;
  rule.max_cost = 0.95;
  // Values repeat, so that filling takes no longer than measuring.
  std::vector<float> values(1 << 16);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = random_fill(7, 128)(i % 2 != 0, 0, static_cast<int>(i), 0, 5);
  }
  const Fill repeated = [&](bool is_key, int, int t, int h, int d) {
    return values[(static_cast<unsigned>(t) * 977 + h * 131 + d * 2 + (is_key ? 1 : 0)) %
                  values.size()];
  };
  for (const int rows : {48, 64}) {
    for (const int tokens : {32768, 131072}) {
      rule.rows = rows;
      const Shape shape{.name = std::to_string(tokens),
                        .q_tokens = tokens,
                        .kv_tokens = tokens,
                        .q_heads = 32,
                        .kv_heads = 8,
                        .dim = 128};
      const Inputs inputs(shape, repeated);
      const std::int64_t bytes = cuda::coverage_index_bytes(inputs.problem, rule);
      const DeviceArray<char> memory(bytes);
      print_times("auto, " + std::to_string(rows) + " rows, " + shape.name + ", workspace MB " +
                      std::to_string(bytes >> 20),
                  [&](cudaStream_t stream) {
                    return cuda::build_coverage_index(inputs.problem, rule, {},
                                                      cuda::box_costs(inputs.problem, true),
                                                      {memory.get(), bytes}, stream);
                  });
    }
  }
}

}  // namespace
}  // namespace minference::cuda_test

int main(int argc, char** argv) {
  using namespace minference::cuda_test;  // NOLINT(google-build-using-namespace)
  return run_index_test(argc, argv, failures, check_all, time_all);
}
