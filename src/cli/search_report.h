// What a pattern search found, as a table and as JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "minference/search.h"

namespace minference::cli {

struct SearchReport {
  std::string model;
  std::int64_t tokens = 0;
  std::int64_t chunk = 0;
  std::int64_t rows = 0;        // sampled of each chunk
  std::int64_t candidates = 0;  // per head
  double budget = 0;
  BudgetShare share = BudgetShare::kShared;
  SearchCosts costs;
  std::vector<HeadChoice> choices;
};

// One line a layer, and one for all.
std::string search_table(const SearchReport& report);

std::string search_json(const SearchReport& report);

}  // namespace minference::cli
