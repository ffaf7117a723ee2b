// Classes Method and MethodOption: what `minference list` shows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "minference/method.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

// A Python number of the option's kind.
nb::object number(const MethodOption& option, double value) {
  return option.integer ? nb::object(nb::int_(static_cast<std::int64_t>(value)))
                        : nb::object(nb::float_(value));
}

}  // namespace

void bind_method(nb::module_& module) {
  nb::class_<MethodOption>(module, "MethodOption", "A named constant of a method.")
      .def_ro("name", &MethodOption::name)
      .def_ro("help", &MethodOption::help)
      .def_prop_ro(
          "default", [](const MethodOption& o) { return number(o, o.default_value); },
          nb::for_getter(nb::sig("def default(self, /) -> int | float")))
      .def_prop_ro(
          "min", [](const MethodOption& o) { return number(o, o.min_value); },
          nb::for_getter(nb::sig("def min(self, /) -> int | float")))
      .def_prop_ro(
          "max", [](const MethodOption& o) { return number(o, o.max_value); },
          nb::for_getter(nb::sig("def max(self, /) -> int | float")))
      .def_ro("integer", &MethodOption::integer, "Whether only whole numbers are legal.")
      .def("__repr__", [](const MethodOption& o) {
        return nb::str("MethodOption('{}', default={}, min={}, max={})")
            .format(o.name, number(o, o.default_value), number(o, o.min_value),
                    number(o, o.max_value));
      });
  nb::class_<Method>(module, "Method", "An attention method.")
      .def_prop_ro("name", &Method::name)
      .def_prop_ro("summary", &Method::summary, "What it keeps, in one line.")
      .def_prop_ro(
          "aliases",
          [](const Method& method) {
            std::vector<std::string> names;
            for (const char* alias : method.aliases()) names.emplace_back(alias);
            return names;
          },
          "Other names that users know it by.")
      .def_prop_ro("options", &Method::options)
      .def_prop_ro("takes_patterns", &Method::takes_patterns,
                   "Whether a pattern file is of any use to it.")
      .def_prop_ro("takes_segments", &Method::takes_segments, "Whether modality segments are.")
      .def("__repr__",
           [](const Method& method) { return nb::str("Method('{}')").format(method.name()); });
  module.def("methods", &attention_methods, nb::rv_policy::reference,
             "Every attention method, in the order in which they are listed to users.");
  module.def("find_method", &find_method, nb::rv_policy::reference, nb::arg("name"),
             "The method with this name or alias. Raises ValueError listing the valid names.");
  module.def(
      "check_options",
      [](const std::string& name, const MethodOptions& options) {
        resolve_options(find_method(name), options);
      },
      nb::arg("name"), nb::arg("options"),
      "Raises ValueError unless the method has all these options and allows their values.");
}

}  // namespace minference::python
