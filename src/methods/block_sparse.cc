// block_sparse: per row block of 64 the key blocks of 64 whose means score highest.
// Source: MInference (arXiv 2407.02490) §3.2.
#include <vector>

#include "core/stopwatch.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class BlockSparseMethod final : public Method {
 public:
  const char* name() const override { return "block_sparse"; }
  const char* summary() const override {
    return "per block of 64 queries the key blocks of 64 whose means match best";
  }
  std::vector<MethodOption> options() const override {
    return {{"top_k", "key blocks kept per row block, diagonal and first included",
             static_cast<double>(kBlockSparseTopK), 1, kMaxCount, true}};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput&, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext&) const override {
    IndexRecipe recipe;
    recipe.kind = IndexRecipe::Kind::kBlockSparse;
    recipe.top_k = whole_option(options, "top_k");
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const Stopwatch watch;
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    const std::vector<std::uint8_t> every_head(index.heads.size(), 1);
    block_sparse_heads(input, params, whole_option(options, "top_k"), every_head, index);
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& block_sparse_method() {
  static const BlockSparseMethod method;
  return method;
}

}  // namespace minference
