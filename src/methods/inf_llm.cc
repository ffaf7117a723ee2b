// inf_llm: the first and the nearest keys, and of the past between them the blocks whose
// representative keys match each block of queries best.
// Source: InfLLM (arXiv 2402.04617) §3.
#include <algorithm>
#include <vector>

#include "core/stopwatch.h"
#include "index/block_grid.h"
#include "index/block_relevance.h"
#include "index/top_k.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

struct Rule {
  std::int64_t n_init = 0;
  std::int64_t n_local = 0;
  std::int64_t topk = 0;
  BlockRelevanceOptions relevance;

  explicit Rule(const MethodOptions& options)
      : n_init(whole_option(options, "n_init")),
        n_local(whole_option(options, "n_local")),
        topk(whole_option(options, "topk")) {
    relevance.block_size = whole_option(options, "block_size");
    relevance.group_rows = whole_option(options, "exc_block_size");
    relevance.representatives = whole_option(options, "repr_topk");
  }
};

// How the keys of one sequence fall into initial, past and local ones.
class Division {
 public:
  Division(const Rule& rule, const SequenceGeometry& geometry)
      : rule_(rule), grid_(geometry, kRowBlock) {}

  const BlockGrid& grid() const { return grid_; }
  std::int64_t execution_blocks() const {
    return (geometry().q_len + rule_.relevance.group_rows - 1) / rule_.relevance.group_rows;
  }
  std::int64_t first_row(std::int64_t e) const { return e * rule_.relevance.group_rows; }
  std::int64_t end_row(std::int64_t e) const {
    return std::min(first_row(e + 1), geometry().q_len);
  }

  // Past blocks of execution block e: behind the initial keys, whole, and further back than
  // n_local from its first row.
  BlockGrid::Range past(std::int64_t e) const {
    const std::int64_t size = rule_.relevance.block_size;
    const std::int64_t local = geometry().position(first_row(e)) - rule_.n_local + 1;
    const std::int64_t init = (rule_.n_init + size - 1) / size;
    const std::int64_t visible = geometry().first_key(first_row(e)) / size;
    BlockGrid::Range range{std::max(init, visible), std::max<std::int64_t>(local, 0) / size};
    range.end = std::max(range.end, range.begin);
    return range;
  }

  // All that e leaves out lies in past blocks.
  bool is_dense() const {
    for (std::int64_t e = 0; e < execution_blocks(); ++e) {
      if (past(e).size() > rule_.topk) return false;
    }
    return true;
  }

  // Every past block of the chunk.
  BlockGrid::Range rated() const {
    if (is_dense()) return {};
    return {past(0).begin, past(execution_blocks() - 1).end};
  }

  // Key blocks of kKeyBlock that row block m of execution block e keeps, given the blocks of the
  // past that e has chosen, ascending.
  std::vector<std::int64_t> kept(std::int64_t m, std::int64_t e,
                                 std::span<const std::int64_t> chosen) const {
    const std::int64_t ratio = rule_.relevance.block_size / kKeyBlock;
    const BlockGrid::Range range = past(e);
    const BlockGrid::Range visible = grid_.visible(m);
    std::vector<std::int64_t> blocks;
    const auto keep = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = std::max(begin, visible.begin); n < std::min(end, visible.end); ++n) {
        blocks.push_back(n);
      }
    };
    keep(0, range.begin * ratio);
    for (const std::int64_t n : chosen) keep(n * ratio, (n + 1) * ratio);
    keep(range.end * ratio, visible.end);
    return blocks;
  }

 private:
  const SequenceGeometry& geometry() const { return grid_.geometry(); }

  const Rule& rule_;
  BlockGrid grid_;
};

HeadIndex build_head(const Rule& rule, const Division& division, const BlockRelevance& relevance,
                     std::int64_t q_tokens) {
  std::vector<std::vector<std::int64_t>> kept(division.grid().row_blocks());
  for (std::int64_t e = 0; e < division.execution_blocks(); ++e) {
    const BlockGrid::Range past = division.past(e);
    const std::span<const float> values =
        relevance.group(e).subspan(past.begin - relevance.blocks.begin, past.size());
    std::vector<std::int64_t> chosen = top_k(values, rule.topk);
    for (std::int64_t& n : chosen) n += past.begin;
    const std::int64_t end = (division.end_row(e) + kRowBlock - 1) / kRowBlock;
    for (std::int64_t m = division.first_row(e) / kRowBlock; m < end; ++m) {
      kept[m] = division.kept(m, e, chosen);
    }
  }
  return block_head(division.grid(), q_tokens, kept);
}

class InfLlmMethod final : public Method {
 public:
  const char* name() const override { return "inf_llm"; }
  const char* summary() const override {
    return "first and nearest keys, and per block of queries the past blocks whose representative "
           "keys match best";
  }
  std::vector<MethodOption> options() const override {
    return {{"n_init", "initial keys, rounded up to whole blocks", 128, 0, kMaxCount, true},
            {"n_local", "nearest keys of an execution block's first row, to the end of a block",
             4096, 1, kMaxCount, true},
            {"topk", "past blocks kept per execution block", 16, 1, kMaxCount, true},
            {"repr_topk", "keys that stand for a block of the past", 4, 1, 1024, true},
            {"block_size", "keys of a block of the past", 128, 64, 1024, true, kKeyBlock},
            {"exc_block_size", "query rows that choose together", 512, 64, 16384, true, kRowBlock}};
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const Stopwatch watch;
    const Rule rule(options);
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    std::vector<Division> divisions;
    std::vector<BlockGrid::Range> rated;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      divisions.emplace_back(rule, SequenceGeometry(input, params, b));
      rated.push_back(divisions.back().rated());
    }
    const std::vector<BlockRelevance> relevance =
        block_relevance(input, params, rule.relevance, rated);
    for (std::int64_t b = 0; b < index.batch; ++b) {
      if (rated[b].size() == 0) continue;
      for (std::int64_t h = 0; h < index.q_heads; ++h) {
        index.head(b, h) =
            build_head(rule, divisions[b], relevance[b * index.q_heads + h], input.q.tokens());
      }
    }
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& inf_llm_method() {
  static const InfLlmMethod method;
  return method;
}

}  // namespace minference
