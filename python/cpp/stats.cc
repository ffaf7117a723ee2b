// Class Stats, and the one of each thread's last call.
#include "last_stats.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings.h"
#include "minference/isa.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

thread_local std::optional<Stats> last;

std::optional<Stats> last_stats() { return last; }

nb::dict to_dict(const Stats& stats) {
  nb::dict dict;
  dict["method"] = stats.method;
  dict["isa"] = stats.kernels();
  dict["kept_pairs"] = stats.kept_pairs;
  dict["causal_pairs"] = stats.causal_pairs;
  dict["kept_fraction"] = stats.kept_fraction();
  dict["index_seconds"] = stats.index_seconds;
  dict["kernel_seconds"] = stats.kernel_seconds;
  dict["guard_seconds"] = stats.guard_seconds;
  dict["mass_recall"] = stats.mass_recall();
  dict["recall_count"] = stats.recall_count;
  dict["fallbacks"] = nb::cast(stats.fallbacks);
  return dict;
}

std::string repr(const Stats& stats) {
  return nb::cast<std::string>(nb::str("Stats({})").format(to_dict(stats)));
}

}  // namespace

void set_last_stats(const Stats& stats) { last = stats; }

void bind_stats(nb::module_& module) {
  nb::class_<Stats>(module, "Stats", "What a call of attention() did, or a sum of several.")
      .def(nb::init<>(), "Figures of no call; fill it with add().")
      .def_ro("method", &Stats::method, "Name of the method; of several \"a+b\".")
      .def_prop_ro(
          "isa", &Stats::kernels,
          "Instruction set level of the kernels; of a CUDA device \"sm_90a\" or \"sm_80\".")
      .def_ro("kept_pairs", &Stats::kept_pairs, "(row, key) pairs computed, over all query heads.")
      .def_ro("causal_pairs", &Stats::causal_pairs,
              "Pairs that dense attention under the same mask computes.")
      .def_prop_ro("kept_fraction", &Stats::kept_fraction, "kept_pairs / causal_pairs.")
      .def_ro("index_seconds", &Stats::index_seconds, "Time of the estimate.")
      .def_ro("kernel_seconds", &Stats::kernel_seconds, "Time of attention itself.")
      .def_ro("guard_seconds", &Stats::guard_seconds, "Time of the guard.")
      .def_prop_ro(
          "mass_recall", &Stats::mass_recall,
          "Mean share of the attention mass that was kept; 1 when the guard measured none.")
      .def_ro("recall_count", &Stats::recall_count, "How many recalls the guard measured.")
      .def_ro("fallbacks", &Stats::fallbacks,
              "Reason -> how often something ran exactly that was asked to run sparse.")
      .def("add", &Stats::add, nb::arg("other"), "Adds the figures of other calls.")
      .def("to_dict", &to_dict, "All figures by name, for JSON.")
      .def("__repr__", &repr);
  module.def("last_stats", &last_stats,
             "Stats of the last call of attention() on this thread, or None.");
}

}  // namespace minference::python
