// Builds a DeviceIndex from device queries and keys, in one stream, without the host reading anything.
//
// The rules are those of the CPU's methods (docs/methods.md). Every function enqueues its kernels and
// returns: results and scratch memory lie in the workspace, which must hold what *_index_bytes says and stay
// untouched until the attention over the index has run. What a call enqueues depends on the sizes in
// `problem`, never on the lengths or values on the device, so that it can be captured into a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "index/cuda/box_costs.h"
#include "minference/index_recipe.h"
#include "minference/pattern.h"

namespace minference::cuda {

// Device memory for an index and for what building it needs, 256-byte aligned.
struct IndexWorkspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// vertical_slash, and minference with a pattern file: one pattern a query head.
std::int64_t pattern_index_bytes(const Problem& problem, std::span<const HeadPattern> heads);
// Throws InvalidArgument for a problem that breaks the contract of attention(), for another number of
// patterns than query heads, or for a workspace that is too small; Unsupported for queries and keys of
// two types and for head dims that are no multiples of 8. f32 tensors are rounded to bf16 where they are
// multiplied.
DeviceIndex build_pattern_index(const Problem& problem, std::span<const HeadPattern> heads,
                                const IndexWorkspace& workspace, cudaStream_t stream);

// block_sparse: per row block the `top_k` key blocks whose means match best, diagonal and first
// included. Errors as above.
std::int64_t block_sparse_index_bytes(const Problem& problem, std::int64_t top_k);
DeviceIndex build_block_sparse_index(const Problem& problem, std::int64_t top_k,
                                     const IndexWorkspace& workspace, cudaStream_t stream);

// xattention: per row block as few key blocks as hold a share of the mass that antidiagonals estimate.
// Errors as above.
std::int64_t antidiagonal_index_bytes(const Problem& problem, const AntidiagonalRule& rule);
DeviceIndex build_antidiagonal_index(const Problem& problem, const AntidiagonalRule& rule,
                                     const IndexWorkspace& workspace, cudaStream_t stream);

// flexprefill: per head block columns and diagonals, or a map of pooled scores. Errors as above.
std::int64_t flexprefill_index_bytes(const Problem& problem, const FlexPrefillRule& rule);
DeviceIndex build_flexprefill_index(const Problem& problem, const FlexPrefillRule& rule,
                                    const IndexWorkspace& workspace, cudaStream_t stream);

// auto: per head the cheapest columns and runs with which the heads of a sequence hold a share of the
// attention mass, or exact attention. A causal problem without explicit mask. rows_after: rows of the
// prompt behind a sequence's, [batch] or empty (not known). Errors as above.
std::int64_t coverage_index_bytes(const Problem& problem, const CoverageRule& rule);
DeviceIndex build_coverage_index(const Problem& problem, const CoverageRule& rule,
                                 std::span<const std::int64_t> rows_after, const BoxCosts& costs,
                                 const IndexWorkspace& workspace, cudaStream_t stream);
// Why there is no such index for these tensors; null where there is one.
const char* coverage_refusal(const Problem& problem);
// Whether sizes alone leave it open that an estimate pays.
bool coverage_may_pay(const Problem& problem, const CoverageRule& rule, const BoxCosts& costs);

// mminference: vertical_slash per modality, or a grid; one entry of `sequences` a sequence. A causal
// problem without explicit mask, whose lengths the entries have, too. Errors as above.
std::int64_t modality_index_bytes(const Problem& problem, const ModalityRule& rule,
                                  std::span<const ModalitySequence> sequences);
DeviceIndex build_modality_index(const Problem& problem, const ModalityRule& rule,
                                 std::span<const ModalitySequence> sequences,
                                 const IndexWorkspace& workspace, cudaStream_t stream);

}  // namespace minference::cuda
