#include "llama/plugin_attention.h"

#include <algorithm>
#include <vector>

#include "core/stopwatch.h"
#include "llama/plugin_mask.h"
#include "llama/plugin_routing.h"
#include "minference/error.h"

namespace minference::llama_host {
namespace {

DType dtype_of(ggml_type type) {
  if (type == GGML_TYPE_F16) return DType::kF16;
  return type == GGML_TYPE_BF16 ? DType::kBF16 : DType::kF32;
}

// One stream of a ggml tensor as [1, tokens, heads, dim]; ggml names the axes from the innermost.
TensorView view_stream(const ggml_tensor* t, int token_axis, int head_axis, std::int64_t stream) {
  const DType dtype = dtype_of(t->type);
  const std::int64_t size = dtype_size(dtype);
  const auto stride = [&](int axis) { return static_cast<std::int64_t>(t->nb[axis]) / size; };
  TensorView view;
  view.data = static_cast<char*>(t->data) + static_cast<std::size_t>(stream) * t->nb[3];
  view.dtype = dtype;
  view.shape = {1, t->ne[token_axis], t->ne[head_axis], t->ne[0]};
  view.strides = {stride(3), stride(token_axis), stride(head_axis), 1};
  return view;
}

TensorView slice_tokens(const TensorView& view, std::int64_t begin, std::int64_t end) {
  TensorView slice = view;
  slice.data = view.row(0, begin, 0);
  slice.shape[1] = end - begin;
  return slice;
}

// One operation, one stream of it at a time.
class FlashAttention {
 public:
  FlashAttention(ggml_tensor* op, const PluginConfig& config, const CallHints& hints,
                 PromptStates& prompts)
      : op_(op),
        config_(config),
        hints_(hints),
        prompts_(prompts),
        layer_(cache_layer(op->src[1])) {
    const FlashAttentionParams given = flash_attention_params(op);
    params_.scale = given.scale;
    params_.soft_cap = given.soft_cap;
    params_.precision = config.precision;
    params_.threads = hints.threads;
    if (const ggml_tensor* sinks = op->src[4]) {
      sinks_ = {static_cast<const float*>(sinks->data), static_cast<std::size_t>(sinks->ne[0])};
    }
    if (config.patterns && layer_ >= 0) check_patterns();
  }

  std::int64_t layer() const { return layer_; }
  const LayerTotals& totals() const { return totals_; }

  void run_stream(std::int64_t stream) {
    q_ = view_stream(op_->src[0], 1, 2, stream);
    k_ = view_stream(op_->src[1], 1, 2, stream);
    v_ = view_stream(op_->src[2], 1, 2, stream);
    out_ = view_stream(op_, 2, 1, stream);
    const ggml_tensor* mask = op_->src[3];
    if (mask == nullptr) {
      run_unmasked();
      return;
    }
    MaskView view;
    view.data = reinterpret_cast<const std::uint16_t*>(
        static_cast<const char*>(mask->data) +
        static_cast<std::size_t>(stream % mask->ne[3]) * mask->nb[3]);
    view.rows = q_.tokens();
    view.keys = k_.tokens();
    view.row_stride = static_cast<std::int64_t>(mask->nb[1] / sizeof(std::uint16_t));
    for (const RowRun& run : read_mask(view, hints_.threads)) {
      if (run.causal) {
        run_causal(run);
      } else {
        run_masked(view, run);
      }
    }
  }

 private:
  void check_patterns() const {
    const PatternFile& file = *config_.patterns;
    file.check_model(file.layers(), op_->src[0]->ne[2], "the loaded model");
    if (layer_ >= file.layers()) {
      throw InvalidArgument(file.name() + " has patterns for " + std::to_string(file.layers()) +
                            " layers, the loaded model has a layer " + std::to_string(layer_));
    }
  }

  AttentionInput input_of(const RowRun& run) const {
    AttentionInput input;
    input.q = slice_tokens(q_, run.first_row, run.first_row + run.rows);
    input.k = slice_tokens(k_, run.key_begin, run.key_end);
    input.v = slice_tokens(v_, run.key_begin, run.key_end);
    input.sinks = sinks_;
    return input;
  }

  AttentionOutput output_of(const RowRun& run) const {
    return {slice_tokens(out_, run.first_row, run.first_row + run.rows), {}};
  }

  void run_causal(const RowRun& run) {
    const AttentionInput input = input_of(run);
    const bool sparse = config_.attn != "dense";
    // Below the two thresholds exact attention is what the configuration asks for.
    const bool small = run.rows < config_.min_rows || run.key_end - run.key_begin < config_.min_kv;
    if (sparse && (small || layer_ < 0)) {
      Stats stats = attention(input, params_, output_of(run));
      if (!small) ++stats.fallbacks["K is not a view of a KV cache"];
      add(stats);
      observe(input, nullptr);
    } else {
      run_method(run, input, params_, causal_context(run, input));
    }
  }

  // The method itself falls back, and says so, when there is a mask or no causality.
  void run_method(const RowRun& run, const AttentionInput& input, const AttentionParams& params,
                  const MethodContext& context) {
    add(attention(input, params, output_of(run), *config_.method, config_.options, context));
  }

  void run_masked(const MaskView& mask, const RowRun& run) {
    if (run.key_begin == run.key_end) {
      clear_rows(run);
      return;
    }
    const std::vector<std::uint64_t> bits = mask_bits(mask, run, hints_.threads);
    AttentionInput input = input_of(run);
    input.mask.words = bits.data();
    input.mask.row_stride = (run.key_end - run.key_begin + 63) / 64;
    input.mask.sequence_stride = static_cast<std::int64_t>(bits.size());
    run_method(run, input, params_, context());
  }

  // Bidirectional attention: no mask, every row sees every key.
  void run_unmasked() {
    AttentionParams params = params_;
    params.causal = false;
    const RowRun all{0, q_.tokens(), 0, k_.tokens(), false};
    run_method(all, input_of(all), params, context());
  }

  MethodContext context() const {
    MethodContext context;
    context.layer = layer_;
    context.patterns = config_.patterns.get();
    context.threads = hints_.threads;
    return context;
  }

  MethodContext causal_context(const RowRun& run, const AttentionInput& input) {
    MethodContext result = context();
    // The hints are of the whole batch: where sequences share it, nothing is known of each.
    if (run.rows == q_.tokens() && op_->src[0]->ne[3] == 1) {
      if (hints_.rows_after >= 0) result.rows_after = {&hints_.rows_after, 1};
      result.segments = {&hints_.segments, 1};
    }
    result.state = prompts_.find(layer_, input.k.data);
    result.guard = config_.guard;
    if (hints_.observer.function != nullptr) {
      result.on_index = [this, &input](const SparseIndex& index) { observe(input, &index); };
    }
    return result;
  }

  void observe(const AttentionInput& input, const SparseIndex* index) const {
    if (hints_.observer.function == nullptr) return;
    hints_.observer.function(hints_.observer.user, {layer_, &input, &params_, index});
  }

  void clear_rows(const RowRun& run) {
    for (std::int64_t row = run.first_row; row < run.first_row + run.rows; ++row) {
      for (std::int64_t head = 0; head < out_.heads(); ++head) {
        std::fill_n(static_cast<float*>(out_.row(0, row, head)), out_.dim(), 0.0F);
      }
    }
  }

  void add(Stats stats) {
    // The method that was asked for; what was not done by it stands among the fallbacks.
    stats.method = config_.method->name();
    totals_.stats.add(stats);
  }

  ggml_tensor* op_;
  const PluginConfig& config_;
  const CallHints& hints_;
  PromptStates& prompts_;
  std::int64_t layer_;
  AttentionParams params_;
  std::span<const float> sinks_;
  TensorView q_;
  TensorView k_;
  TensorView v_;
  TensorView out_;
  LayerTotals totals_;
};

}  // namespace

MethodState* PromptStates::find(std::int64_t layer, const void* first_key) {
  // As many as a server usually has slots.
  constexpr std::size_t kSequences = 16;
  std::vector<Sequence>& sequences = layers_[layer];
  auto found = std::find_if(sequences.begin(), sequences.end(), [=](const Sequence& sequence) {
    return sequence.first_key == first_key;
  });
  if (found == sequences.end()) {
    if (sequences.size() == kSequences) sequences.pop_back();
    sequences.push_back({first_key, {}});
    found = sequences.end() - 1;
  }
  std::rotate(sequences.begin(), found, found + 1);
  return &sequences.front().state;
}

void compute_flash_attention(ggml_tensor* op, const PluginConfig& config, const CallHints& hints,
                             PromptStates& prompts, StatsBoard& board) {
  const Stopwatch watch;
  FlashAttention call(op, config, hints, prompts);
  for (std::int64_t stream = 0; stream < op->src[0]->ne[3]; ++stream) call.run_stream(stream);
  LayerTotals totals = call.totals();
  totals.calls = 1;
  totals.total_seconds = watch.seconds();
  board.add(call.layer(), totals);
}

}  // namespace minference::llama_host
