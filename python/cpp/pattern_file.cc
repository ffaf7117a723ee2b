// Class PatternFile: per-head patterns in the reference system's JSON.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <new>
#include <string>
#include <tuple>

#include "bindings.h"
#include "minference/error.h"
#include "minference/pattern.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

HeadPattern::Kind parse_kind(const std::string& name) {
  using Kind = HeadPattern::Kind;
  for (const Kind kind : {Kind::kVerticalSlash, Kind::kAShape, Kind::kBlockSparse}) {
    if (name == pattern_kind_name(kind)) return kind;
  }
  throw InvalidArgument("pattern is '" + name +
                        "'; legal: vertical_and_slash, stream_llm, block_sparse");
}

}  // namespace

void bind_pattern_file(nb::module_& module) {
  nb::class_<PatternFile>(
      module, "PatternFile",
      "Patterns of a model's attention heads: a JSON list with one object per layer, each mapping "
      "the\nhead number to [type, vertical, slash, score], as the reference system writes it.")
      .def(nb::init<std::int64_t>(), nb::arg("layers"), "A file without any head yet.")
      .def_static("load", &PatternFile::load, nb::arg("path"),
                  "Reads a file. Raises OSError, or ValueError naming layer, head and value.")
      .def_static("parse", &PatternFile::parse, nb::arg("text"), nb::arg("name") = "text",
                  "As load(), from JSON text; name is what error messages call it.")
      .def("save", &PatternFile::save, nb::arg("path"),
           "Writes the JSON; the path holds the whole file or what it held before.")
      .def("to_json", &PatternFile::to_json, "The JSON text.")
      .def_prop_ro("layers", &PatternFile::layers)
      .def_prop_ro("heads", &PatternFile::heads, "One more than the largest head number.")
      .def_prop_ro("name", &PatternFile::name, "Path that it was read from, or \"\".")
      .def(
          "at",
          [](const PatternFile& file, std::int64_t layer, std::int64_t head) {
            const HeadPattern pattern = file.at(layer, head);
            return nb::make_tuple(pattern_kind_name(pattern.kind), pattern.vertical, pattern.slash,
                                  pattern.score);
          },
          nb::arg("layer"), nb::arg("head"),
          "(type, vertical, slash, score) of a head, the default where the file has none.")
      .def(
          "set",
          [](PatternFile& file, std::int64_t layer, std::int64_t head, const std::string& type,
             std::int64_t vertical, std::int64_t slash, double score) {
            file.set(layer, head, {parse_kind(type), vertical, slash, score});
          },
          nb::arg("layer"), nb::arg("head"), nb::arg("type"), nb::arg("vertical"), nb::arg("slash"),
          nb::arg("score") = 0.0,
          "Gives a head its pattern: type vertical_and_slash, stream_llm or block_sparse with its "
          "two "
          "numbers.\nRaises ValueError for a layer that the file does not have, and for what no "
          "file "
          "may hold.")
      .def("check_model", &PatternFile::check_model, nb::arg("layers"), nb::arg("q_heads"),
           nb::arg("model") = "model",
           "Raises ValueError, naming both sides, unless the file is for a model of this shape.")
      .def("__getstate__",
           [](const PatternFile& file) { return nb::make_tuple(file.to_json(), file.name()); })
      .def("__setstate__",
           [](PatternFile& self, const std::tuple<std::string, std::string>& state) {
             new (&self) PatternFile(PatternFile::parse(std::get<0>(state), std::get<1>(state)));
           })
      .def("__repr__", [](const PatternFile& file) {
        return nb::str("PatternFile('{}', layers={}, heads={})")
            .format(file.name(), file.layers(), file.heads());
      });
}

}  // namespace minference::python
