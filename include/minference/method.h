// Attention methods by name: each turns (Q, K, options) into a SparseIndex.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "minference/attention.h"
#include "minference/guard.h"
#include "minference/index_recipe.h"
#include "minference/pattern.h"
#include "minference/segment.h"
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

// What a method remembers of the prompts of one layer from chunk to chunk. The caller owns it,
// gives the same object with every chunk of the same sequences, and an empty one with others. Rows
// from before the end of what is remembered begin anew: a prompt from position 0 needs no empty one.
struct MethodState {
  SparseIndex index;                  // dense heads: nothing is remembered
  std::vector<std::int64_t> kv_lens;  // [batch] keys that the index was estimated from; 0: none
  // [batch * q_heads] length of the sequence from which on a head is estimated anew; auto only.
  std::vector<std::int64_t> next_estimate;
  // [batch * q_heads] share of the estimate's mass that the index keeps; auto only.
  std::vector<double> kept_share;
  // [batch] modalities among the estimated rows, a bit each, and [batch * q_heads] lines of the heads
  // that are grids, whose index is of the block form and empty; mminference only.
  std::vector<std::uint8_t> modalities;
  std::vector<std::vector<GridLines>> lines;
};

// What a method needs to know beyond the tensors.
struct MethodContext {
  std::int64_t layer = 0;                 // layer number, for per-layer rules and pattern files
  const PatternFile* patterns = nullptr;  // per-head patterns, or null
  int threads = 0;                        // 0: the OpenMP default
  // Rows of the same prompt that later calls bring, [batch], or empty where that is not known: then
  // every chunk counts as the last one.
  std::span<const std::int64_t> rows_after;
  // Modality segments of the whole prompt, [batch], or empty: text only. The prompt of a sequence
  // ends after its keys and the rows of rows_after.
  std::span<const std::span<const Segment>> segments;
  // null: calls share nothing, so that each chunk is estimated anew; only `static` needs one.
  MethodState* state = nullptr;
  GuardOptions guard;
  // Shown the index that was used, guard included, after the attention over it; may be empty.
  std::function<void(const SparseIndex&)> on_index;
};

// A method. Stateless (what is remembered lies with the caller): one object serves every layer,
// sequence and thread.
class Method {
 public:
  virtual ~Method() = default;
  virtual const char* name() const = 0;
  virtual const char* summary() const = 0;  // one line for `list` and --help
  virtual std::vector<MethodOption> options() const = 0;
  // Other names that users know it by.
  virtual std::vector<const char*> aliases() const { return {}; }
  // Whether MethodContext::patterns is of any use to it.
  virtual bool takes_patterns() const { return false; }
  // Whether MethodContext::segments is.
  virtual bool takes_segments() const { return false; }

  // The index for this chunk of queries against all keys so far. `input` obeys the contract of
  // attention() and has been validated; `options` were resolved by resolve_options().
  virtual SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                                  const MethodOptions& options,
                                  const MethodContext& context) const = 0;

  // Whether build_index() looks at the tensors' elements, not at sizes and positions alone.
  virtual bool reads_tensors(const MethodOptions& options, const MethodContext& context) const;
  // What build_index() would do, where a CUDA device can do it; nothing where it cannot. Arguments as
  // there, but that the tensors' elements are not looked at; a state is not followed: every chunk is
  // estimated anew.
  virtual std::optional<IndexRecipe> recipe(const AttentionInput& input,
                                            const AttentionParams& params,
                                            const MethodOptions& options,
                                            const MethodContext& context) const;
};

// Every method that works, in the order in which they are listed to users.
const std::vector<const Method*>& attention_methods();

// The method with this name or alias. Throws InvalidArgument listing the valid names.
const Method& find_method(std::string_view name);

// Every name for a message, separated by commas, aliases in brackets.
std::string attention_method_names();

// `given` completed by the method's defaults. Throws InvalidArgument naming an unknown key (with
// the valid list) or a value outside its range.
MethodOptions resolve_options(const Method& method, const MethodOptions& given);

// What values an option takes, for a message: "multiples of 64 from 64 to 1024".
std::string legal_values(const MethodOption& option);

// Parses "key=value" into `options`. Throws InvalidArgument on anything else than a finite number.
void parse_option(std::string_view text, MethodOptions& options);

// Builds the index and runs attention over it: the call that hosts make. `options` may be partial.
// With tensors on a CUDA device all of it happens there, in AttentionParams::stream. Throws Unsupported,
// naming the methods that can, for a method that has no kernels there, and for on_index. The guard
// reports there with AttentionParams::measure only.
Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const Method& method, const MethodOptions& options,
                const MethodContext& context);

}  // namespace minference
