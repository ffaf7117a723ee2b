// block_sparse: per row block of 64 the key blocks of 64 whose means score highest.
// Source: MInference (arXiv 2407.02490) §3.2.
#include <chrono>
#include <vector>

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
             static_cast<double>(kBlockSparseTopK), 1, 1e9, true}};
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const auto start = std::chrono::steady_clock::now();
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    const std::vector<std::uint8_t> every_head(index.heads.size(), 1);
    block_sparse_heads(input, params, static_cast<std::int64_t>(options.at("top_k")), every_head,
                       index);
    index.build_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return index;
  }
};

}  // namespace

const Method& block_sparse_method() {
  static const BlockSparseMethod method;
  return method;
}

}  // namespace minference
