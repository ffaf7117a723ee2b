#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "explain/html_text.h"
#include "explain/report.h"
#include "explain/report_page.h"
#include "explain/report_pictures.h"
#include "minference/version.h"

namespace minference::explain {
namespace {

std::string number(double value, int digits) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string percent(double share, int digits) { return number(100.0 * share, digits) + " %"; }

std::string seconds(double value) { return number(value, value < 10 ? 2 : 1) + " s"; }

// 12,345
std::string grouped(std::int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string anchor(const HeadId& id) {
  return "layer" + std::to_string(id.layer) + "-head" + std::to_string(id.head);
}

std::string title_of(const HeadId& id) {
  return "layer " + std::to_string(id.layer) + ", head " + std::to_string(id.head);
}

// Which kinds of index a head had: "diagonal", or "diagonal (4 of 5 steps), dense (1)".
std::string kinds_of(const HeadFigures& figures) {
  std::string text = kind_name(figures.kind());
  const auto steps = [&](std::size_t kind) { return std::to_string(figures.steps_of_kind[kind]); };
  const auto main = static_cast<std::size_t>(figures.kind());
  if (figures.steps_of_kind[main] == figures.steps) return text;
  text += " in " + steps(main) + " of " + std::to_string(figures.steps) + " steps";
  for (std::size_t kind = 0; kind < figures.steps_of_kind.size(); ++kind) {
    if (kind == main || figures.steps_of_kind[kind] == 0) continue;
    text +=
        ", " + std::string(kind_name(static_cast<HeadIndex::Kind>(kind))) + " in " + steps(kind);
  }
  return text;
}

std::string figures_of(const ExplainReport& report, const HeadId& id) {
  const HeadFigures& figures = report.figures.at(id);
  if (figures.steps == 0) return "not seen: left to the model's own engine";
  const std::string pattern = pattern_text(report, id);
  return "keeps " + percent(figures.kept_fraction(), 1) + ", recall " +
         percent(figures.recall(), 2) + ", " + kinds_of(figures) +
         (pattern.empty() ? "" : "; pattern file: " + pattern);
}

Colour stage_colour(std::size_t stage) {
  constexpr Colour kColours[] = {{0x4a, 0x6f, 0xa5},
                                 {0xc4, 0x55, 0x3d},
                                 {0xd9, 0x9a, 0x2b},
                                 {0x5f, 0x8f, 0x5b},
                                 {0x8b, 0x93, 0x9e}};
  return kColours[stage % std::size(kColours)];
}

std::string dot(const Colour& colour) {
  return "<span class=\"dot\" style=\"background:" + css(colour) + "\"></span>";
}

std::string stage_bar(const ExplainReport& report) {
  constexpr double kLabelled = 0.09;  // narrower parts have no room for a name
  std::string html;
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const Stage& stage = report.stages[i];
    const double share = stage.seconds / report.ttft_seconds;
    if (share <= 0) continue;
    html += "<i style=\"width:" + number(100.0 * share, 2) +
            "%;background:" + css(stage_colour(i)) + "\" title=\"" + stage.name + ": " +
            seconds(stage.seconds) + ", " + percent(share, 1) + "\">" +
            (share >= kLabelled ? stage.name + " " + percent(share, 0) : "") + "</i>";
  }
  return html;
}

std::string stage_rows(const ExplainReport& report) {
  std::string html;
  for (std::size_t i = 0; i < report.stages.size(); ++i) {
    const Stage& stage = report.stages[i];
    html += "<tr><td>" + dot(stage_colour(i)) + stage.name + "</td><td class=\"n\">" +
            number(stage.seconds, 3) + "</td><td class=\"n\">" +
            percent(stage.seconds / report.ttft_seconds, 1) + "</td><td class=\"soft\">" +
            stage.help + "</td></tr>\n";
  }
  return html;
}

struct Tick {
  double place;  // 0 to 1
  std::string text;
};

std::string ticks(const std::vector<Tick>& marks, const char* side) {
  std::string html;
  for (const Tick& tick : marks) {
    const char* edge = tick.place <= 0.01   ? " class=\"first\""
                       : tick.place >= 0.97 ? " class=\"last\""
                                            : "";
    html += "<span" + std::string(edge) + " style=\"" + side + ":" + number(100.0 * tick.place, 2) +
            "%\">" + tick.text + "</span>";
  }
  return html;
}

std::string legend(const ColourScale& scale, const std::vector<double>& values,
                   const std::vector<std::string>& texts) {
  std::vector<Tick> marks;
  for (std::size_t i = 0; i < values.size(); ++i) {
    marks.push_back({scale.position(values[i]), texts[i]});
  }
  return "<div class=\"legend\"><div class=\"scale\"><div style=\"background:" +
         scale.map.css_gradient() + "\"></div></div><div class=\"scale ticks\">" +
         ticks(marks, "left") + "</div></div>\n";
}

std::string kind_legend() {
  std::string html = "<div class=\"legend kinds\">";
  for (const HeadIndex::Kind kind :
       {HeadIndex::Kind::kDense, HeadIndex::Kind::kDiagonal, HeadIndex::Kind::kBlock}) {
    html += "<span>" + dot(kind_colour(kind)) + kind_name(kind) + "</span>";
  }
  return html + "</div>\n";
}

// Squares of all heads with labels at both axes.
std::string head_grid(const ExplainReport& report,
                      const std::function<Colour(const HeadFigures&)>& colour) {
  const AttentionFigures& figures = report.figures;
  const std::int64_t width = std::clamp<std::int64_t>(300 / figures.heads(), 8, 30);
  const std::int64_t height = std::clamp<std::int64_t>(560 / figures.layers(), 8, 18);
  const std::int64_t layer_step = height >= 14 ? 1 : 4;
  const std::int64_t head_step = width >= 18 ? 1 : 4;
  std::string html =
      "<div class=\"axis\">heads &rarr; &nbsp; layers &darr;</div>"
      "<div class=\"grid\" style=\"--h:" +
      std::to_string(height) + "px;grid-template-columns:26px repeat(" +
      std::to_string(figures.heads()) + "," + std::to_string(width) +
      "px);grid-auto-rows:" + std::to_string(height) + "px\">\n<span></span>";
  for (std::int64_t head = 0; head < figures.heads(); ++head) {
    html += "<span class=\"x\">" + (head % head_step == 0 ? std::to_string(head) : std::string()) +
            "</span>";
  }
  for (std::int64_t layer = 0; layer < figures.layers(); ++layer) {
    html += "\n<span class=\"y\">" +
            (layer % layer_step == 0 ? std::to_string(layer) : std::string()) + "</span>";
    for (std::int64_t head = 0; head < figures.heads(); ++head) {
      const HeadId id{layer, head};
      const HeadFigures& each = figures.at(id);
      const bool shown = std::any_of(report.heads.begin(), report.heads.end(),
                                     [&](const ShownHead& other) { return other.id == id; });
      const std::string tag = shown ? "a" : "i";
      html += "<" + tag;
      if (shown) html += " href=\"#" + anchor(id) + "\"";
      html += " style=\"background:" + css(each.steps > 0 ? colour(each) : kNotSeenColour) + "\"";
      html += " title=\"" + title_of(id) + ": " + figures_of(report, id) + "\"></";
      html += tag + ">";
    }
  }
  return html + "</div>\n";
}

Colour kept_of(const HeadFigures& figures) { return kept_scale().at(figures.kept_fraction()); }
Colour recall_of(const HeadFigures& figures) { return recall_scale().at(figures.recall()); }
Colour kind_of(const HeadFigures& figures) { return kind_colour(figures.kind()); }

std::string head_maps(const ExplainReport& report) {
  const std::string kept =
      "<h3>Kept fraction</h3><p class=\"how\">How much of its attention each head computed. Pale "
      "heads "
      "are cheap, dark ones nearly or wholly exact.</p>" +
      legend(kept_scale(), {0, 0.25, 0.5, 0.75, 1}, {"0 %", "25 %", "50 %", "75 %", "100 %"});
  const std::string recall =
      "<h3>Recall</h3><p class=\"how\">How much of what each head would look at was among the keys "
      "that it "
      "computed. Pale is good; dark heads lost attention and may change the answer.</p>" +
      legend(recall_scale(), {0.999, 0.99, 0.9, 0}, {"&ge; 99.9 %", "99 %", "90 %", "0 %"});
  const std::string kind =
      "<h3>Kind</h3><p class=\"how\">The form in which each head's keys were chosen. Dense: all "
      "keys. "
      "Diagonal: some keys for every query, and keys at some distances behind it. Blocks: 64 keys "
      "for 64 "
      "queries at a time.</p>" +
      kind_legend();
  return "<div>" + kept + head_grid(report, kept_of) + "</div>\n<div>" + recall +
         head_grid(report, recall_of) + "</div>\n<div>" + kind + head_grid(report, kind_of) +
         "</div>\n";
}

std::string layer_rows(const ExplainReport& report) {
  std::string html;
  for (std::int64_t layer = 0; layer < report.figures.layers(); ++layer) {
    const HeadFigures sum = report.figures.layer(layer);
    if (sum.steps == 0) continue;
    const HeadId worst = report.figures.worst(layer);
    html += "<tr><td class=\"n\">" + std::to_string(layer) + "</td><td class=\"n\">" +
            percent(sum.kept_fraction(), 1) + "</td><td class=\"n\">" + percent(sum.recall(), 2) +
            "</td><td class=\"n\">" + percent(report.figures.at(worst).recall(), 2) + "</td><td>" +
            std::to_string(worst.head) + "</td></tr>\n";
  }
  return html;
}

// Round positions along an axis of tokens, three to six of them.
std::vector<Tick> token_ticks(std::int64_t tokens) {
  std::int64_t step = 1;
  for (std::int64_t power = 1; tokens / step > 5; power *= 10) {
    for (const std::int64_t factor : {1, 2, 5}) {
      step = factor * power;
      if (tokens / step <= 5) break;
    }
  }
  std::vector<Tick> marks;
  for (std::int64_t token = 0; token < tokens; token += step) {
    marks.push_back({static_cast<double>(token) / static_cast<double>(tokens), grouped(token)});
  }
  return marks;
}

std::string plot(const AttentionMap& map, const std::string& caption, const std::string& alt,
                 const std::string& png) {
  const std::vector<Tick> marks = token_ticks(map.tokens());
  return "<figure><figcaption>" + caption +
         "</figcaption><div class=\"plot\"><div class=\"ylabels\">" + ticks(marks, "top") +
         "<em>query</em></div><img alt=\"" + alt + "\" title=\"" + alt + "\" src=\"" +
         png_data_uri(png) + "\"><div class=\"ticks\">" + ticks(marks, "left") +
         "</div><div class=\"axis\">key</div></div></figure>\n";
}

std::string shown_heads(const ExplainReport& report, const std::vector<ReportFile>& pictures) {
  if (report.heads.empty()) return {};
  std::string html = fill_template(
      kReportHeads,
      {{"mass_legend", legend(mass_scale(), {1e-4, 1e-3, 1e-2, 1e-1, 1},
                              {"0.01 %", "0.1 %", "1 %", "10 %", "100 %"})},
       {"kept_legend", legend(cell_scale(), {0, 0.01, 0.1, 1}, {"none", "1 %", "10 %", "all"})},
       {"step", grouped(report.step_tokens)}});
  for (std::size_t i = 0; i < report.heads.size(); ++i) {
    const HeadId id = report.heads[i].id;
    const AttentionMap& map = report.heads[i].map;
    const HeadFigures& figures = report.figures.at(id);
    html += "<article id=\"" + anchor(id) + "\"><h3>Layer " + std::to_string(id.layer) + ", head " +
            std::to_string(id.head) +
            "<span class=\"tag\" style=\"background:" + css(kind_colour(figures.kind())) + "\">" +
            kind_name(figures.kind()) + "</span></h3>\n<p class=\"soft\">" +
            figures_of(report, id) + "</p>\n<div class=\"plots\">" +
            plot(map, "Attention", "attention of " + title_of(id), pictures[3 * i].content) +
            plot(map, "Kept", "kept keys of " + title_of(id), pictures[3 * i + 1].content) +
            plot(map, "Lost", "lost attention of " + title_of(id), pictures[3 * i + 2].content) +
            "</div></article>\n";
  }
  return html;
}

std::string before_prefill(const ExplainReport& report) {
  if (!report.load_seconds || !report.tokenise_seconds) return {};
  return " Before that, loading the model took " + seconds(*report.load_seconds) +
         " and cutting the text into tokens " + seconds(*report.tokenise_seconds) + ".";
}

std::string notes(const ExplainReport& report) {
  std::string html;
  for (const std::string& note : report.notes) html += "<li>" + html_escape(note) + "</li>";
  return html.empty() ? html : "<ul class=\"soft\">" + html + "</ul>\n";
}

std::string page(const ExplainReport& report, const std::vector<ReportFile>& head_pictures) {
  const HeadFigures total = report.figures.total();
  const std::vector<HeadId> order = report.figures.by_recall();
  const std::string side =
      std::to_string(std::min<std::int64_t>(AttentionMap::kMaxSize, report.prompt_tokens));
  return fill_template(
      kReportPage,
      {{"version", version()},
       {"model", html_escape(report.model)},
       {"prompt", html_escape(report.prompt)},
       {"tokens", grouped(report.prompt_tokens)},
       {"method", html_escape(report.method)},
       {"options", report.options.empty() ? "" : " (" + html_escape(report.options) + ")"},
       {"segments", report.segments.empty() ? "" : ", segments " + html_escape(report.segments)},
       {"threads", std::to_string(report.threads) + (report.threads == 1 ? " thread" : " threads")},
       {"isa", html_escape(report.isa)},
       {"guard", html_escape(report.guard)},
       {"ttft", seconds(report.ttft_seconds)},
       {"kept", percent(total.kept_fraction(), 1)},
       {"recall", percent(total.recall(), 2)},
       {"worst", percent(report.figures.at(order.front()).recall(), 1)},
       {"worst_head", title_of(order.front())},
       {"before", before_prefill(report)},
       {"stage_bar", stage_bar(report)},
       {"stage_rows", stage_rows(report)},
       {"notes", notes(report)},
       {"layers", std::to_string(report.figures.layers())},
       {"heads", std::to_string(report.figures.heads())},
       {"head_maps", head_maps(report)},
       {"layer_rows", layer_rows(report)},
       {"shown", shown_heads(report, head_pictures)},
       {"guard_rows", std::to_string(report.guard_rows)},
       {"map_size", side + " x " + side + " cells"},
       {"sampled", std::to_string(AttentionMap::kSampledRows)}});
}

}  // namespace

std::vector<ReportFile> report_files(const ExplainReport& report, const PngEncoder& encode_png) {
  std::vector<ReportFile> files;
  for (const ShownHead& head : report.heads) {
    const auto add = [&](const char* what, const Picture& picture) {
      files.push_back({picture_name(what, head.id), encode_png(picture)});
    };
    add("attention", attention_picture(head.map));
    add("kept", kept_picture(head.map));
    add("lost", lost_picture(head.map));
  }
  std::string html = page(report, files);
  files.push_back({"kept.png", encode_png(head_picture(report.figures, kept_of))});
  files.push_back({"recall.png", encode_png(head_picture(report.figures, recall_of))});
  files.push_back({"kind.png", encode_png(head_picture(report.figures, kind_of))});
  files.push_back({"index.html", std::move(html)});
  return files;
}

}  // namespace minference::explain
