// The cost table: what indices and the guard cost beside dense attention, in chunked prefill.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/attention.h"

namespace minference::bench {

// Measures the last max(2048, chunk) rows of each prompt, chunk by chunk and in the state that the
// rows before them leave: index seconds of every method (its defaults; vertical_slash with the
// bench's options), guard seconds (16 rows), and the seconds of dense attention over the same
// chunks. Returns the rows; `table` hears them as they come, null for none.
nlohmann::ordered_json measure_index_cost(const AttentionBench& bench,
                                          const std::vector<std::int64_t>& lengths,
                                          std::FILE* table);

}  // namespace minference::bench
