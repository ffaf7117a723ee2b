// The pictures of an `explain` report, and the colours that its page shares with them.
#pragma once

#include <functional>
#include <string>

#include "explain/figures.h"
#include "explain/picture.h"
#include "guard/attention_map.h"

namespace minference::explain {

// A quantity that is shown by colour.
struct ColourScale {
  ColourMap map;
  std::function<double(double)> position;  // of a value on the map, 0 to 1
  Colour at(double value) const;
};

const ColourScale& kept_scale();    // kept fraction, linear from 0 to 1
const ColourScale& recall_scale();  // by what is lost, logarithmic from 0.1 % to all
const ColourScale& mass_scale();    // attention mass of a cell, logarithmic from kMinMass to 1
inline constexpr double kMinMass = 1e-4;
inline constexpr double kMinShare = 1e-3;

const ColourScale& cell_scale();  // kept share of a cell, logarithmic: one key must show

Colour kind_colour(HeadIndex::Kind kind);
inline constexpr Colour kNotSeenColour{0xe3, 0xe6, 0xea};

// One square a head, layers from top to bottom and heads from left to right.
Picture head_picture(const AttentionFigures& figures,
                     const std::function<Colour(const HeadFigures&)>& colour);

// Queries from top to bottom and keys from left to right.
Picture attention_picture(const AttentionMap& map);
Picture kept_picture(const AttentionMap& map);
Picture lost_picture(const AttentionMap& map);

// "attention-layer3-head5.png"; what: attention, kept or lost.
std::string picture_name(const char* what, const HeadId& id);
// Whether a file of this name is such a picture, of whatever report.
bool is_head_picture(const std::string& name);

}  // namespace minference::explain
