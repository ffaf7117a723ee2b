// Private entry points of the ggml plug-in, for hosts of ours that load it by path.
//
// They are looked up with ggml_backend_reg_get_proc_address(reg, name), as are ggml's own optional
// functions, of which the plug-in has "ggml_backend_set_n_threads" and
// "ggml_backend_set_abort_callback" (libllama passes llama_set_abort_callback() on to it).
// Strings are UTF-8 JSON; returned pointers stay valid until the next call of the same function
// from the same thread.
#pragma once

#include <cstdint>

#include "explain/attention_call.h"
#include "minference/segment.h"

namespace minference::llama_host {

// Name under which the plug-in registers itself with ggml.
inline constexpr char kRegistryName[] = "minference";

// Replaces the plug-in's configuration. Returns null, or the reason why it was refused; then the
// configuration is unchanged. Keys are those of the table in plugin_config.cc, which also names
// the MINFERENCE_* variables; keys that are left out have their default. For example
// {"attn": "vertical_slash", "options": {"vertical_size": 500}}.
inline constexpr char kConfigureName[] = "minference_configure";
using ConfigureFn = const char* (*)(const char* json);

// Totals since the last reset: {"method", "isa" (null: no calls), "calls", "kept_pairs", "causal_pairs",
// "index_seconds", "kernel_seconds", "total_seconds", "mass_recall" (number or null),
// "fallbacks": {reason: times}, "layers": [{"layer", the same figures}],
// "linear_calls", "linear_seconds" (matrix products),
// "declined": [kinds of prompt attention that were left to llama.cpp]}.
inline constexpr char kStatsName[] = "minference_stats";
using StatsFn = const char* (*)();

inline constexpr char kResetStatsName[] = "minference_reset_stats";
using ResetStatsFn = void (*)();

// How many rows of the same prompt follow those of the calling thread's next computations; -1, as at
// the start: not known. With 0 and with -1, methods that treat the last rows of a prompt in another
// way (tri_shape) treat those of the chunk so; with 0, methods that share an estimate between chunks
// estimate this one anew. Ignored where sequences share a batch.
inline constexpr char kSetRowsAfterName[] = "minference_set_rows_after";
using SetRowsAfterFn = void (*)(std::int64_t rows);

// Modality segments of the prompt whose rows the calling thread computes next, for methods that tell
// modalities apart; count 0, as at the start: text only. Positions count from the prompt's first token,
// and none lies behind the rows of minference_set_rows_after. The segments stay the caller's and must
// stay valid until they are replaced. Ignored where sequences share a batch.
inline constexpr char kSetSegmentsName[] = "minference_set_segments";
using SetSegmentsFn = void (*)(const Segment* segments, std::int64_t count);

// One call of causal prompt attention that the plug-in has just made, of the same build of the library as
// the plug-in.
using AttentionCall = explain::AttentionCall;

// Whom the plug-in shows every such call, from the thread that computes; null: nobody. What the
// observer throws (a std::exception) fails the computation.
inline constexpr char kSetObserverName[] = "minference_set_observer";
using AttentionObserver = void (*)(void* user, const AttentionCall& call);
using SetObserverFn = void (*)(AttentionObserver observer, void* user);

}  // namespace minference::llama_host
