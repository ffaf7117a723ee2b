// Prefill matrix products of the plug-in: which MUL_MAT operations it takes, and computing them.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "minference/isa.h"

namespace minference::llama_host {

// Fewest rows of a batch from which linear() beats ggml for weights of this type at this level, or
// 0 for never. Measured with linear_bench; see docs/performance.md.
std::int64_t linear_min_rows(ggml_type type, IsaLevel level);

// True when weights of this type are faster in ggml's plain layout than repacked, whoever computes:
// linear() reads only that layout, and ggml's own tiles for k-quants do as well.
bool prefers_plain_layout(ggml_type type, IsaLevel level);

// Decides by shapes, types and where the weight lies. `own_type` is the plug-in's weight buffer type:
// while a model is loaded, llama.cpp asks with an empty buffer of that type.
bool takes_linear(const ggml_tensor* op, IsaLevel level, ggml_backend_buffer_type_t own_type);

// Computes an operation that takes_linear() accepted.
void compute_linear(ggml_tensor* op, IsaLevel level, int threads);

}  // namespace minference::llama_host
