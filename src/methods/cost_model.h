// CostModel: what this machine's kernels need for exact and for sparse attention, measured once.
#pragma once

#include <cstdint>
#include <string>

#include "minference/isa.h"

namespace minference {

// Seconds per row block of kRowBlock query rows of one head, on one of several busy threads.
struct CostModel {
  double dense_key = 0;   // exact attention, per key
  double run_key = 0;     // per key of a run
  double column_key = 0;  // per gathered column
  double row_block = 0;   // beside the keys, of a sparse head

  double dense(double keys) const { return dense_key * keys; }
  double sparse(double run_keys, double column_keys) const {
    return row_block + run_key * run_keys + column_key * column_keys;
  }
};

// The model for heads of these sizes at this level, measured in a fraction of a second by the first
// call that needs it and kept for the process and, as JSON, in the user's cache folder:
// $MINFERENCE_CACHE, else $XDG_CACHE_HOME/minference, else ~/.cache/minference. A file that cannot be
// read, or is of another version or processor, is measured anew; one that cannot be written is done
// without. Thread-safe.
CostModel cost_model(IsaLevel level, std::int64_t head_dim, std::int64_t v_head_dim, int threads);

// Path of the file of measured models; empty when no folder is known.
std::string cost_model_path();

}  // namespace minference
