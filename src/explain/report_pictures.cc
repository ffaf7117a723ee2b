#include "explain/report_pictures.h"

#include <algorithm>
#include <cmath>
#include <regex>

namespace minference::explain {
namespace {

// What a causal query cannot see.
constexpr Colour kHiddenColour{0xee, 0xf0, 0xf3};
// Of the values of a picture; one more colour is that of hidden cells.
constexpr int kShades = 255;

Picture map_picture(const AttentionMap& map, const ColourScale& scale,
                    double (AttentionMap::*value)(std::int64_t, std::int64_t) const) {
  // Large enough to be looked at on its own.
  constexpr std::int64_t kSide = 512;
  Picture picture{map.size(), map.size(), {kHiddenColour}, {}};
  for (int shade = 0; shade < kShades; ++shade) {
    picture.palette.push_back(scale.map.at(static_cast<double>(shade) / (kShades - 1)));
  }
  for (std::int64_t row = 0; row < map.size(); ++row) {
    for (std::int64_t column = 0; column < map.size(); ++column) {
      const double position = scale.position((map.*value)(row, column));
      const auto shade = static_cast<std::uint8_t>(1 + std::lround(position * (kShades - 1)));
      picture.pixels.push_back(map.visible(row, column) ? shade : 0);
    }
  }
  return enlarge(picture, std::max<std::int64_t>(1, kSide / map.size()));
}

}  // namespace

Colour ColourScale::at(double value) const {
  // Fewer than the colours of a palette.
  constexpr double kSteps = 128;
  return map.at(std::round(position(value) * kSteps) / kSteps);
}

const ColourScale& kept_scale() {
  static const ColourScale kScale{{{0xf4, 0xf7, 0xfb},
                                   {0xa9, 0xc9, 0xe3},
                                   {0x4f, 0x93, 0xc5},
                                   {0x1b, 0x5a, 0x9a},
                                   {0x08, 0x26, 0x55}},
                                  [](double value) { return value; }};
  return kScale;
}

const ColourScale& recall_scale() {
  static const ColourScale kScale{
      {{0xf3, 0xf8, 0xf1}, {0xfc, 0xdc, 0x92}, {0xee, 0x7b, 0x3c}, {0x86, 0x0f, 0x2c}},
      [](double recall) { return log_position(1.0 - recall, 1e-3, 1.0); }};
  return kScale;
}

const ColourScale& mass_scale() {
  static const ColourScale kScale{{{0xfd, 0xfb, 0xf5},
                                   {0xfb, 0xd9, 0x8b},
                                   {0xf0, 0x8a, 0x3c},
                                   {0xb8, 0x2f, 0x55},
                                   {0x2b, 0x0b, 0x4e}},
                                  [](double mass) { return log_position(mass, kMinMass, 1.0); }};
  return kScale;
}

const ColourScale& cell_scale() {
  static const ColourScale kScale{kept_scale().map,
                                  [](double share) { return log_position(share, kMinShare, 1.0); }};
  return kScale;
}

Colour kind_colour(HeadIndex::Kind kind) {
  switch (kind) {
    case HeadIndex::Kind::kDense:
      return {0x9a, 0xa3, 0xae};
    case HeadIndex::Kind::kDiagonal:
      return {0x3d, 0x7f, 0xb8};
    case HeadIndex::Kind::kBlock:
      break;
  }
  return {0xe0, 0x8a, 0x2e};
}

Picture head_picture(const AttentionFigures& figures,
                     const std::function<Colour(const HeadFigures&)>& colour) {
  constexpr std::int64_t kCell = 16;
  Picture picture{figures.heads(), figures.layers(), {}, {}};
  for (std::int64_t layer = 0; layer < figures.layers(); ++layer) {
    for (std::int64_t head = 0; head < figures.heads(); ++head) {
      const HeadFigures& each = figures.at({layer, head});
      const Colour wanted = each.steps > 0 ? colour(each) : kNotSeenColour;
      const auto found = std::find(picture.palette.begin(), picture.palette.end(), wanted);
      const auto index = found - picture.palette.begin();
      if (found == picture.palette.end()) picture.palette.push_back(wanted);
      picture.pixels.push_back(static_cast<std::uint8_t>(index));
    }
  }
  return enlarge(picture, kCell);
}

Picture attention_picture(const AttentionMap& map) {
  return map_picture(map, mass_scale(), &AttentionMap::mass);
}

Picture kept_picture(const AttentionMap& map) {
  return map_picture(map, cell_scale(), &AttentionMap::kept);
}

Picture lost_picture(const AttentionMap& map) {
  return map_picture(map, mass_scale(), &AttentionMap::lost);
}

std::string picture_name(const char* what, const HeadId& id) {
  return std::string(what) + "-layer" + std::to_string(id.layer) + "-head" +
         std::to_string(id.head) + ".png";
}

bool is_head_picture(const std::string& name) {
  static const std::regex kName(R"((attention|kept|lost)-layer\d+-head\d+\.png)");
  return std::regex_match(name, kName);
}

}  // namespace minference::explain
