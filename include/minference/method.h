// Attention methods by name: each turns (Q, K, options) into a SparseIndex.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "minference/attention.h"
#include "minference/pattern.h"
#include "minference/sparse_index.h"

namespace minference {

// One named constant of a method, with its default and legal range.
struct MethodOption {
  std::string name;
  std::string help;
  double default_value = 0;
  double min_value = 0;
  double max_value = 0;
  bool integer = true;
  std::int64_t multiple_of = 1;  // whole numbers: legal values are multiples of it
  std::int64_t divisor_of = 0;   // whole numbers: legal values divide it; 0: no such limit
};

// Values of options by name; a name that is absent has its default.
using MethodOptions = std::map<std::string, double>;

// What a method needs to know beyond the tensors.
struct MethodContext {
  std::int64_t layer = 0;                 // layer number, for per-layer rules and pattern files
  const PatternFile* patterns = nullptr;  // per-head patterns, or null
  int threads = 0;                        // 0: the OpenMP default
};

// A method. Stateless: one object serves every layer, sequence and thread.
class Method {
 public:
  virtual ~Method() = default;
  virtual const char* name() const = 0;
  virtual const char* summary() const = 0;  // one line for `list` and --help
  virtual std::vector<MethodOption> options() const = 0;

  // The index for this chunk of queries against all keys so far. `input` obeys the contract of
  // attention() and has been validated; `options` were resolved by resolve_options().
  virtual SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                                  const MethodOptions& options,
                                  const MethodContext& context) const = 0;
};

// Every method that works, in the order in which they are listed to users.
const std::vector<const Method*>& attention_methods();

// The method with this name. Throws InvalidArgument listing the valid names.
const Method& find_method(std::string_view name);

// `given` completed by the method's defaults. Throws InvalidArgument naming an unknown key (with
// the valid list) or a value outside its range.
MethodOptions resolve_options(const Method& method, const MethodOptions& given);

// Parses "key=value" into `options`. Throws InvalidArgument on anything else than a finite number.
void parse_option(std::string_view text, MethodOptions& options);

// Builds the index and runs attention over it: the call that hosts make. `options` may be partial.
Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const Method& method, const MethodOptions& options,
                const MethodContext& context);

}  // namespace minference
