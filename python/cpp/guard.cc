// Class Guard: how the guard watches a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "bindings.h"
#include "minference/error.h"
#include "minference/guard.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

GuardMode parse_mode(const std::string& name) {
  if (name == "off") return GuardMode::kOff;
  if (name == "report") return GuardMode::kReport;
  if (name == "enforce") return GuardMode::kEnforce;
  throw InvalidArgument("guard is '" + name + "'; legal: off, report, enforce");
}

const char* mode_name(GuardMode mode) {
  switch (mode) {
    case GuardMode::kOff:
      return "off";
    case GuardMode::kReport:
      return "report";
    case GuardMode::kEnforce:
      return "enforce";
  }
  return "";
}

GuardOptions make(const std::string& mode, std::int64_t rows, double min_recall) {
  return {.mode = parse_mode(mode), .rows = rows, .min_recall = min_recall};
}

std::string repr(const GuardOptions& guard) {
  return nb::cast<std::string>(nb::str("Guard(mode='{}', rows={}, min_recall={})")
                                   .format(mode_name(guard.mode), guard.rows, guard.min_recall));
}

}  // namespace

void bind_guard(nb::module_& module) {
  nb::class_<GuardOptions>(
      module, "Guard",
      "Watches how much of the exact attention mass a sparse call keeps, on sampled query rows.\n\n"
      "mode: \"off\", \"report\" (measure, see Stats.mass_recall) or \"enforce\" (and compute the "
      "heads\nexactly that keep less than min_recall). rows: sampled per sequence and head, 1 to "
      "64.\nmin_recall: 0 to 1. Raises ValueError for another mode; numbers are checked by the "
      "call.")
      .def(
          "__init__",
          [](GuardOptions* self, const std::string& mode, std::int64_t rows, double min_recall) {
            new (self) GuardOptions(make(mode, rows, min_recall));
          },
          nb::arg("mode") = "report", nb::arg("rows") = GuardOptions{}.rows,
          nb::arg("min_recall") = GuardOptions{}.min_recall)
      .def_prop_ro("mode", [](const GuardOptions& guard) { return mode_name(guard.mode); })
      .def_ro("rows", &GuardOptions::rows)
      .def_ro("min_recall", &GuardOptions::min_recall)
      .def("__reduce__",
           [](const GuardOptions& guard) {
             return nb::make_tuple(
                 nb::type<GuardOptions>(),
                 nb::make_tuple(mode_name(guard.mode), guard.rows, guard.min_recall));
           })
      .def("__repr__", &repr);
}

}  // namespace minference::python
