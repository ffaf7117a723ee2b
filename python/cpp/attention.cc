// attention() for Python, by a method's name and over an index.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention_arguments.h"
#include "bindings.h"
#include "explanation.h"
#include "last_stats.h"
#include "method_state.h"
#include "minference/attention.h"
#include "minference/error.h"
#include "minference/guard.h"
#include "minference/method.h"
#include "minference/pattern.h"
#include "minference/segment.h"
#include "minference/sparse_index.h"
#include "tensor_argument.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

AttentionArguments read_arguments(nb::handle q, nb::handle k, nb::handle v, nb::handle q_lens,
                                  nb::handle kv_lens, nb::handle table, nb::handle sinks,
                                  nb::handle mask, float scale, bool causal,
                                  std::int64_t sliding_window, float soft_cap,
                                  const std::string& precision, int threads, std::uintptr_t stream,
                                  bool measure) {
  AttentionArguments arguments(q, k, v);
  arguments.q_lens = integers("q_lens", q_lens);
  arguments.kv_lens = integers("kv_lens", kv_lens);
  arguments.table = block_table(table, arguments.batch());
  arguments.sinks = floats("sinks", sinks);
  if (!mask.is_none()) {
    arguments.mask = pack_mask(mask, arguments.batch(), arguments.q.view().tokens(),
                               arguments.key_capacity(), arguments.q.device());
  }
  arguments.params = {.scale = scale,
                      .soft_cap = soft_cap,
                      .sliding_window = sliding_window,
                      .causal = causal,
                      .precision = parse_precision(precision),
                      .threads = threads,
                      .stream = reinterpret_cast<void*>(stream),
                      .measure = measure};
  return arguments;
}

// Options by name; None stands for the default. Throws InvalidArgument for what is no number.
MethodOptions read_options(const nb::dict& given) {
  MethodOptions options;
  for (const auto& [key, value] : given) {
    if (value.is_none()) continue;
    double number = 0;
    if (!nb::try_cast(value, number)) {
      throw InvalidArgument("option " + nb::cast<std::string>(nb::str(key)) + " is " +
                            nb::cast<std::string>(nb::repr(value)) + "; legal: a number");
    }
    options[nb::cast<std::string>(nb::str(key))] = number;
  }
  return options;
}

// Where results go; lse may be None.
struct Results {
  TensorArgument out;
  std::optional<TensorArgument> lse;

  Results(nb::handle out_object, nb::handle lse_object) : out("out", out_object, Access::kWrite) {
    if (!lse_object.is_none()) lse.emplace("lse", lse_object, Access::kWrite);
  }

  AttentionOutput output() const { return {out.view(), lse ? lse->view() : TensorView{}}; }
};

void attend_method(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                   const std::string& method, const nb::dict& options, nb::handle q_lens,
                   nb::handle kv_lens, nb::handle table, nb::handle sinks, nb::handle mask,
                   float scale, bool causal, std::int64_t sliding_window, float soft_cap,
                   const std::string& precision, int threads, std::uintptr_t stream, bool measure,
                   std::int64_t layer, const PatternFile* patterns, SharedMethodState* state,
                   const GuardOptions* guard, nb::handle rows_after,
                   const std::optional<std::vector<std::vector<Segment>>>& segments,
                   Explanation* explanation) {
  const Method& chosen = find_method(method);
  const MethodOptions chosen_options = read_options(options);
  const AttentionArguments arguments =
      read_arguments(q, k, v, q_lens, kv_lens, table, sinks, mask, scale, causal, sliding_window,
                     soft_cap, precision, threads, stream, measure);
  const Results results(out, lse);
  const std::vector<std::int64_t> after = integers("rows_after", rows_after);
  std::vector<std::span<const Segment>> spans;
  if (segments) spans.assign(segments->begin(), segments->end());

  MethodContext context;
  context.layer = layer;
  context.patterns = patterns;
  context.threads = threads;
  context.rows_after = after;
  context.segments = spans;
  if (guard != nullptr) context.guard = *guard;
  const AttentionInput input = arguments.input();
  if (explanation != nullptr) {
    explanation->check(layer, input.q);
    context.on_index = [&](const SparseIndex& index) {
      explanation->add({layer, &input, &arguments.params, &index});
    };
  }

  Stats stats;
  {
    const nb::gil_scoped_release release;
    const StateLock lock(state);
    context.state = lock.get();
    stats = attention(input, arguments.params, results.output(), chosen, chosen_options, context);
  }
  set_last_stats(stats);
}

void attend_index(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                  const SparseIndex* index, nb::handle q_lens, nb::handle kv_lens, nb::handle table,
                  nb::handle sinks, nb::handle mask, float scale, bool causal,
                  std::int64_t sliding_window, float soft_cap, const std::string& precision,
                  int threads, std::uintptr_t stream, bool measure) {
  const AttentionArguments arguments =
      read_arguments(q, k, v, q_lens, kv_lens, table, sinks, mask, scale, causal, sliding_window,
                     soft_cap, precision, threads, stream, measure);
  const Results results(out, lse);
  Stats stats;
  {
    const nb::gil_scoped_release release;
    stats = attention(arguments.input(), arguments.params, results.output(), index);
  }
  set_last_stats(stats);
}

}  // namespace

void bind_attention(nb::module_& module) {
  module.def(
      "attend_method", &attend_method, nb::arg("q").none(), nb::arg("k").none(),
      nb::arg("v").none(), nb::arg("out").none(), nb::arg("lse").none(), nb::arg("method"),
      nb::arg("options"), nb::arg("q_lens").none(), nb::arg("kv_lens").none(),
      nb::arg("block_table").none(), nb::arg("sinks").none(), nb::arg("mask").none(),
      nb::arg("scale"), nb::arg("causal"), nb::arg("sliding_window"), nb::arg("soft_cap"),
      nb::arg("precision"), nb::arg("threads"), nb::arg("stream"), nb::arg("measure"),
      nb::arg("layer"), nb::arg("patterns").none(), nb::arg("state").none(),
      nb::arg("guard").none(), nb::arg("rows_after").none(), nb::arg("segments").none(),
      nb::arg("explanation").none(),
      "Attention by a method's name, written into out and lse; minference.attention() is the "
      "convenient form.");
  module.def("attend_index", &attend_index, nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("out").none(), nb::arg("lse").none(),
             nb::arg("index").none(), nb::arg("q_lens").none(), nb::arg("kv_lens").none(),
             nb::arg("block_table").none(), nb::arg("sinks").none(), nb::arg("mask").none(),
             nb::arg("scale"), nb::arg("causal"), nb::arg("sliding_window"), nb::arg("soft_cap"),
             nb::arg("precision"), nb::arg("threads"), nb::arg("stream"), nb::arg("measure"),
             "Attention over the keys of an index, exact where it is None.");
}

}  // namespace minference::python
