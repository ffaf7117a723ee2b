// Class PatternSearch: which pattern serves each attention head best, measured chunk by chunk.
#include "minference/search.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "core/format_number.h"
#include "minference/error.h"
#include "tensor_argument.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

using CostsByName = std::map<std::string, double>;

CostsByName by_name(const SearchCosts& costs) {
  return {{"runs", costs.runs},
          {"columns", costs.columns},
          {"window", costs.window},
          {"blocks", costs.blocks},
          {"estimate", costs.estimate}};
}

// Names that are absent keep their default.
SearchCosts parse_costs(const std::optional<CostsByName>& given) {
  SearchCosts costs;
  const std::map<std::string, double*> fields = {{"runs", &costs.runs},
                                                 {"columns", &costs.columns},
                                                 {"window", &costs.window},
                                                 {"blocks", &costs.blocks},
                                                 {"estimate", &costs.estimate}};
  for (const auto& [name, value] : given.value_or(CostsByName{})) {
    const auto field = fields.find(name);
    if (field == fields.end()) {
      throw InvalidArgument("costs has '" + name +
                            "'; legal: runs, columns, window, blocks, estimate");
    }
    if (!(value >= 0 && value <= 1000)) {
      throw InvalidArgument("costs['" + name + "'] is " + format_number(value) +
                            "; legal: 0 to 1000");
    }
    *field->second = value;
  }
  return costs;
}

BudgetShare parse_share(const std::string& name) {
  if (name == "shared") return BudgetShare::kShared;
  if (name == "equal") return BudgetShare::kEqual;
  throw InvalidArgument("share is '" + name + "'; legal: shared, equal");
}

bool add_chunk(PatternSearch& search, std::int64_t layer, nb::handle q, nb::handle k, nb::handle v,
               float scale, float soft_cap, std::int64_t sliding_window, nb::handle sinks,
               int threads) {
  const TensorArgument queries("q", q, Access::kRead);
  const TensorArgument keys("k", k, Access::kRead);
  const TensorArgument values("v", v, Access::kRead);
  if (queries.device().kind != Device::Kind::kCpu) {  // k and v have to lie where q does
    throw InvalidArgument("q is on device " + device_name(queries.device()) +
                          "; legal: cpu, where the search computes");
  }
  const std::vector<float> logits = floats("sinks", sinks);
  AttentionInput input;
  input.q = queries.view();
  input.k = keys.view();
  input.v = values.view();
  input.sinks = logits;
  AttentionParams params;
  params.scale = scale;
  params.soft_cap = soft_cap;
  params.sliding_window = sliding_window;
  params.threads = threads;
  const nb::gil_scoped_release release;
  return search.add_chunk(layer, input, params);
}

nb::list choose(const PatternSearch& search, double budget, const std::string& share,
                const std::optional<CostsByName>& costs) {
  nb::list heads;
  for (const HeadChoice& choice : search.choose(parse_costs(costs), budget, parse_share(share))) {
    nb::dict head;
    head["layer"] = choice.layer;
    head["head"] = choice.head;
    head["type"] = pattern_kind_name(choice.pattern.kind);
    head["vertical"] = choice.pattern.vertical;
    head["slash"] = choice.pattern.slash;
    head["score"] = choice.pattern.score;
    head["mass_recall"] = choice.recall;
    head["kept_fraction"] = choice.kept;
    head["cost"] = choice.cost;
    heads.append(head);
  }
  return heads;
}

nb::bytes state(const PatternSearch& search, const std::string& purpose) {
  const std::string bytes = search.state(purpose);
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace

void bind_search(nb::module_& module) {
  module.attr("MIN_SEARCH_TOKENS") = kMinSearchTokens;
  module.attr("MAX_SEARCH_ROWS") = kMaxSearchRows;
  nb::class_<PatternSearch>(
      module, "PatternSearch",
      "Measures candidate patterns of every attention head on the chunks of one prompt.\n\ntokens: "
      "length of the prompt. rows: query rows sampled of each chunk.\nSource: MInference (arXiv "
      "2407.02490) §3.3.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), nb::arg("layers"),
           nb::arg("q_heads"), nb::arg("tokens"), nb::arg("rows") = 16)
      .def("add_chunk", &add_chunk, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("scale") = 0.0F, nb::arg("soft_cap") = 0.0F, nb::arg("sliding_window") = 0,
           nb::arg("sinks") = nb::none(), nb::arg("threads") = 0,
           "Measures a chunk of one sequence on the CPU: q [1, rows, heads, head_dim] against all "
           "keys so\nfar. Chunks come in order. Returns whether it was new.")
      .def("choose", &choose, nb::arg("budget") = 0.25, nb::arg("share") = "shared",
           nb::arg("costs") = nb::none(),
           "The patterns that keep most for at most budget times the cost of dense attention, a "
           "dict "
           "a head.\nshare: \"shared\" (heads together) or \"equal\" (each head). costs: see "
           "measure_search_costs().")
      .def("state", &state, nb::arg("purpose"), "All that was measured so far, for restore().")
      .def(
          "restore",
          [](PatternSearch& search, const nb::bytes& bytes, const std::string& purpose) {
            search.restore({bytes.c_str(), bytes.size()}, purpose);
          },
          nb::arg("state"), nb::arg("purpose"),
          "Takes up what state() gave. Raises ValueError unless it is whole, of a search with the "
          "same "
          "arguments\nand for the same purpose, any text.")
      .def_prop_ro("candidates", &PatternSearch::candidates,
                   "Patterns that are compared for each head.");
  module.def(
      "measure_search_costs",
      [](std::int64_t head_dim, int threads) {
        const nb::gil_scoped_release release;
        return by_name(measure_search_costs(head_dim, threads));
      },
      nb::arg("head_dim"), nb::arg("threads") = 0,
      "What a (query, key) pair costs in each kind of work beside one of dense attention, on "
      "this\ndevice. Takes some seconds.");
}

}  // namespace minference::python
