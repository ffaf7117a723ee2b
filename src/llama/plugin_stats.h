// Totals of what the plug-in did, per layer: for minference_stats, and for the table at exit.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "minference/attention.h"

namespace minference::llama_host {

// Figures of one layer, or of all of them.
struct LayerTotals {
  std::int64_t calls = 0;    // operations of the graph
  Stats stats;               // sums over the calls of attention() inside them
  double total_seconds = 0;  // everything, mask reading included

  void add(const LayerTotals& other);
};

// Thread-safe: several contexts of one process report to the same board.
class StatsBoard {
 public:
  void add(std::int64_t layer, const LayerTotals& totals);
  // One matrix product.
  void add_linear(double seconds);
  // Remembers that operations are left to llama.cpp; true when the reason is new.
  bool add_declined(const std::string& reason);
  void reset();

  std::string json() const;
  // A table with one line a layer and a line of totals; empty when nothing ran.
  std::string table() const;

 private:
  LayerTotals sum_locked() const;

  mutable std::mutex mutex_;
  std::map<std::int64_t, LayerTotals> layers_;
  std::int64_t linear_calls_ = 0;
  double linear_seconds_ = 0;
  std::set<std::string> declined_;
};

}  // namespace minference::llama_host
