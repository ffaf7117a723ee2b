// Class Explanation: what attention kept and lost, head by head, and the report of it.
#include "explanation.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/stopwatch.h"
#include "minference/error.h"
#include "minference/guard.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

using HeadPair = std::pair<std::int64_t, std::int64_t>;  // (layer, head)

void require_at_least_one(const char* name, std::int64_t value) {
  if (value >= 1) return;
  throw InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; legal: 1 or more");
}

std::vector<explain::HeadId> head_ids(const std::vector<HeadPair>& pairs) {
  std::vector<explain::HeadId> ids;
  for (const auto& [layer, head] : pairs) ids.push_back({layer, head});
  return ids;
}

std::vector<HeadPair> head_pairs(const std::vector<explain::HeadId>& ids) {
  std::vector<HeadPair> pairs;
  for (const explain::HeadId& id : ids) pairs.emplace_back(id.layer, id.head);
  return pairs;
}

nb::list heads(const Explanation& explanation) {
  const explain::AttentionFigures figures = explanation.figures();
  nb::list list;
  for (std::int64_t layer = 0; layer < figures.layers(); ++layer) {
    for (std::int64_t h = 0; h < figures.heads(); ++h) {
      const explain::HeadFigures& each = figures.at({layer, h});
      if (each.steps == 0) continue;
      nb::dict head;
      head["layer"] = layer;
      head["head"] = h;
      head["kept_fraction"] = each.kept_fraction();
      head["mass_recall"] = each.recall();
      head["kind"] = explain::kind_name(each.kind());
      list.append(head);
    }
  }
  return list;
}

template <typename Value>
void read(const nb::dict& about, const char* key, Value& value) {
  if (about.contains(key)) value = nb::cast<Value>(about[key]);
}

// `about` has the report's other fields by name; absent ones are empty.
explain::ExplainReport filled_report(const Explanation& explanation, const nb::dict& about) {
  explain::ExplainReport report = explanation.report();
  if (report.figures.total().steps == 0) {
    throw InvalidArgument("nothing to explain: no call of attention() was shown");
  }
  read(about, "model", report.model);
  read(about, "prompt", report.prompt);
  read(about, "step_tokens", report.step_tokens);
  read(about, "method", report.method);
  read(about, "options", report.options);
  read(about, "guard", report.guard);
  read(about, "isa", report.isa);
  read(about, "threads", report.threads);
  read(about, "ttft_seconds", report.ttft_seconds);
  read(about, "notes", report.notes);
  if (about.contains("stages")) {
    for (const nb::handle row : about["stages"]) {
      const auto stage = nb::cast<nb::tuple>(row);
      report.stages.push_back({nb::cast<std::string>(stage[0]), nb::cast<std::string>(stage[1]),
                               nb::cast<std::string>(stage[2]), nb::cast<double>(stage[3])});
    }
  }
  if (about.contains("patterns") && !about["patterns"].is_none()) {
    report.patterns =
        std::make_shared<const PatternFile>(nb::cast<const PatternFile&>(about["patterns"]));
  }
  return report;
}

nb::bytes as_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// encode_png(width, height, palette, pixels) makes the bytes of a PNG file.
nb::dict files(const Explanation& explanation, const nb::callable& encode_png,
               const nb::dict& about) {
  const explain::ExplainReport report = filled_report(explanation, about);
  const explain::PngEncoder encoder = [&](const explain::Picture& picture) {
    std::string palette;
    for (const explain::Colour& colour : picture.palette) {
      for (const std::uint8_t part : {colour.red, colour.green, colour.blue}) {
        palette += static_cast<char>(part);
      }
    }
    const std::string pixels(picture.pixels.begin(), picture.pixels.end());
    const auto png = nb::cast<nb::bytes>(
        encode_png(picture.width, picture.height, as_bytes(palette), as_bytes(pixels)));
    return std::string(png.c_str(), png.size());
  };
  nb::dict result;
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  result["report.json"] =
      as_bytes(explain::report_json(report).dump(2, ' ', false, kReplace) + "\n");
  for (const explain::ReportFile& file : explain::report_files(report, encoder)) {
    result[file.name.c_str()] = as_bytes(file.content);
  }
  return result;
}

}  // namespace

Explanation::Explanation(std::int64_t layers, std::int64_t q_heads, std::int64_t tokens,
                         const std::vector<explain::HeadId>& shown, std::int64_t guard_rows)
    : tokens_(tokens), guard_rows_(guard_rows) {
  require_at_least_one("layers", layers);
  require_at_least_one("q_heads", q_heads);
  require_at_least_one("tokens", tokens);
  if (guard_rows < 1 || guard_rows > kMaxGuardRows) {
    throw InvalidArgument("guard_rows is " + std::to_string(guard_rows) + "; legal: 1 to " +
                          std::to_string(kMaxGuardRows));
  }
  explain::check_heads(shown, layers, q_heads);
  figures_ = explain::AttentionFigures(layers, q_heads);
  shown_ = explain::empty_maps(shown, tokens);
}

void Explanation::check(std::int64_t layer, const TensorView& q) const {
  if (layer < 0 || layer >= figures_.layers()) {
    throw InvalidArgument("layer is " + std::to_string(layer) + "; legal: 0 to " +
                          std::to_string(figures_.layers() - 1) +
                          ", the layers of the explanation");
  }
  if (q.batch() != 1 || q.heads() != figures_.heads()) {
    throw InvalidArgument("q has batch " + std::to_string(q.batch()) + " and " +
                          std::to_string(q.heads()) + " heads; legal with explanation=: 1 and " +
                          std::to_string(figures_.heads()));
  }
}

void Explanation::add(const explain::AttentionCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Stopwatch watch;
  figures_.add(call, guard_rows_);
  explain::add_maps(shown_, call);
  seconds_ += watch.seconds();
}

explain::ExplainReport Explanation::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  explain::ExplainReport report;
  report.prompt_tokens = tokens_;
  report.guard_rows = guard_rows_;
  report.figures = figures_;
  report.heads = shown_;
  return report;
}

explain::AttentionFigures Explanation::figures() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return figures_;
}

double Explanation::seconds() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_;
}

void bind_explanation(nb::module_& module) {
  nb::class_<Explanation>(
      module, "Explanation",
      "What a prefill kept and lost of the attention of every head, on the CPU.\n\nGiven to "
      "attention() with each chunk of each layer of one prompt of `tokens` tokens. shown: (layer, "
      "head)\npairs of which the report has maps, at most 32. guard_rows: query rows of a chunk on "
      "which the kept\nmass is measured, 1 to 64. Raises ValueError for a number outside its range "
      "and "
      "for heads that such a\nmodel does not have.")
      .def(
          "__init__",
          [](Explanation* self, std::int64_t layers, std::int64_t q_heads, std::int64_t tokens,
             const std::vector<HeadPair>& shown, std::int64_t guard_rows) {
            new (self) Explanation(layers, q_heads, tokens, head_ids(shown), guard_rows);
          },
          nb::arg("layers"), nb::arg("q_heads"), nb::arg("tokens"), nb::arg("shown") = nb::list(),
          nb::arg("guard_rows") = GuardOptions{}.rows)
      .def_prop_ro("heads", &heads,
                   "A dict a head that was seen: layer, head, kept_fraction, mass_recall, kind "
                   "(dense, diagonal or\nblocks).")
      .def_prop_ro(
          "kept_fraction", [](const Explanation& e) { return e.figures().total().kept_fraction(); },
          "Share of the causal area that was computed.")
      .def_prop_ro(
          "mass_recall", [](const Explanation& e) { return e.figures().total().recall(); },
          "Mean share of the attention mass that was kept.")
      .def_prop_ro("seconds", &Explanation::seconds, "What explaining itself has taken.")
      .def(
          "telling_heads",
          [](const Explanation& e) { return head_pairs(e.figures().telling_heads()); },
          "(layer, head) pairs: those with the lowest recall, and typical ones.")
      .def("files", &files, nb::arg("encode_png"), nb::arg("about"),
           "The report as a dict of file name to bytes: report.json, pictures, and index.html "
           "last.\n\n"
           "encode_png(width, height, palette, pixels): the bytes of a PNG file. about: what else "
           "the page "
           "tells,\nby name: model, prompt, method, options, guard, isa (str), step_tokens, "
           "threads (int), "
           "ttft_seconds\n(float), stages (a list of (key, name, help, seconds)), notes (a list of "
           "str), "
           "patterns (a\nPatternFile). Raises ValueError before the first call was shown.");
}

}  // namespace minference::python
