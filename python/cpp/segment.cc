// Class Segment: tokens of one modality in a prompt.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "bindings.h"
#include "minference/error.h"
#include "minference/segment.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

Modality parse_modality(const std::string& name) {
  if (name == "text") return Modality::kText;
  if (name == "visual") return Modality::kVisual;
  throw InvalidArgument("modality is '" + name + "'; legal: text, visual");
}

const char* modality_name(Modality modality) {
  return modality == Modality::kText ? "text" : "visual";
}

}  // namespace

void bind_segment(nb::module_& module) {
  nb::class_<Segment>(
      module, "Segment",
      "Tokens [begin, end) of a prompt, absolute positions, of one modality: "
      "\"text\" or \"visual\".\n\nstride: tokens of a frame of a visual segment, the "
      "period of its patterns; 0: not known. Raises ValueError for "
      "another modality; positions are checked by the call.")
      .def(
          "__init__",
          [](Segment* self, std::int64_t begin, std::int64_t end, const std::string& modality,
             std::int64_t stride) {
            new (self) Segment{begin, end, parse_modality(modality), stride};
          },
          nb::arg("begin"), nb::arg("end"), nb::arg("modality") = "visual", nb::arg("stride") = 0)
      .def_ro("begin", &Segment::begin)
      .def_ro("end", &Segment::end)
      .def_prop_ro("modality", [](const Segment& s) { return modality_name(s.modality); })
      .def_ro("stride", &Segment::stride)
      .def("__reduce__",
           [](const Segment& s) {
             return nb::make_tuple(
                 nb::type<Segment>(),
                 nb::make_tuple(s.begin, s.end, modality_name(s.modality), s.stride));
           })
      .def("__repr__", [](const Segment& s) {
        return nb::str("Segment({}, {}, '{}', stride={})")
            .format(s.begin, s.end, modality_name(s.modality), s.stride);
      });
}

}  // namespace minference::python
