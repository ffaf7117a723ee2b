// dense: exact attention, every causal key.
#include "methods/method_table.h"

namespace minference {
namespace {

class DenseMethod final : public Method {
 public:
  const char* name() const override { return "dense"; }
  const char* summary() const override { return "exact attention over every key"; }
  std::vector<MethodOption> options() const override { return {}; }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams&, const MethodOptions&,
                          const MethodContext&) const override {
    SparseIndex index;
    index.batch = input.q.batch();
    index.q_heads = input.q.heads();
    index.heads.resize(index.batch * index.q_heads);
    return index;
  }
};

}  // namespace

const Method& dense_method() {
  static const DenseMethod method;
  return method;
}

}  // namespace minference
