// The ggml backend: registry, device and backend objects around compute_flash_attention() and
// compute_linear().
//
// The computing device is of type ACCEL, which llama.cpp ranks above the CPU, reports the CPU's own
// buffer type and accepts every host buffer: the scheduler then hands it each operation that it
// claims, without copies. A second device only offers a buffer type for weights. All of ggml's
// structures here come from a private header, hence the version check.
#include "llama/plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>

#include "core/stopwatch.h"
#include "llama/ggml_guard.h"
#include "llama/plugin_api.h"
#include "llama/plugin_attention.h"
#include "llama/plugin_config.h"
#include "llama/plugin_linear.h"
#include "llama/plugin_routing.h"
#include "llama/plugin_stats.h"

namespace minference::llama_host {
namespace {

// Everything that outlives a backend. Never destroyed: ggml keeps pointers into it until exit.
struct Plugin {
  HostApi api;
  StatsBoard board;
  ggml_backend_reg registry{};
  ggml_backend_device device{};
  // A second device that computes nothing: llama.cpp asks each ACCEL device for a buffer type of its
  // own for the weights, before it considers its repacked layouts, which linear() cannot read.
  ggml_backend_device weights_device{};
  ggml_backend_buffer_type weights_type{};

  std::shared_ptr<const PluginConfig> config() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return config_;
  }
  Observer observer() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return observer_;
  }
  void set_observer(Observer observer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    observer_ = observer;
  }
  void set_config(PluginConfig config) {
    auto shared = std::make_shared<const PluginConfig>(std::move(config));
    const std::lock_guard<std::mutex> lock(mutex_);
    config_ = std::move(shared);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const PluginConfig> config_;
  Observer observer_;
};

Plugin& plugin() {
  static Plugin* const instance = new Plugin;
  return *instance;
}

// Of the next computations, see plugin_api.h. ggml computes in the thread that calls it.
thread_local std::int64_t rows_after = -1;
thread_local std::span<const Segment> segments;

void say(const std::string& text) { std::fprintf(stderr, "minference: %s\n", text.c_str()); }

// ---- backend: one per llama_context

struct BackendContext {
  int threads = 0;
  PromptStates prompts;
  std::shared_ptr<const PluginConfig> prompts_config;  // that `prompts` was filled under
  ggml_abort_callback should_abort = nullptr;
  void* abort_data = nullptr;
};

BackendContext& context_of(ggml_backend_t backend) {
  return *static_cast<BackendContext*>(backend->context);
}

const char* backend_name(ggml_backend_t) { return kRegistryName; }

void backend_free(ggml_backend_t backend) {
  delete &context_of(backend);
  delete backend;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) noexcept {
  try {
    BackendContext& context = context_of(backend);
    const std::shared_ptr<const PluginConfig> config = plugin().config();
    if (context.prompts_config != config) {
      context.prompts = {};
      context.prompts_config = config;
    }
    const int count = plugin().api.graph_node_count(graph);
    for (int i = 0; i < count; ++i) {
      ggml_tensor* node = plugin().api.graph_node(graph, i);
      // Views need no work, and are all else that the scheduler puts beside what was taken.
      const bool attention = node->op == GGML_OP_FLASH_ATTN_EXT;
      if ((!attention && node->op != GGML_OP_MUL_MAT) ||
          (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        continue;
      }
      if (context.should_abort != nullptr && context.should_abort(context.abort_data)) {
        return GGML_STATUS_ABORTED;
      }
      if (attention) {
        compute_flash_attention(node, *config,
                                {context.threads, rows_after, plugin().observer(), segments},
                                context.prompts, plugin().board);
      } else {
        const Stopwatch watch;
        compute_linear(node, config->isa, context.threads);
        plugin().board.add_linear(watch.seconds());
      }
    }
    return GGML_STATUS_SUCCESS;
  } catch (const std::bad_alloc&) {
    say("error: out of memory");
    return GGML_STATUS_ALLOC_FAILED;
  } catch (const std::exception& e) {
    say(std::string("error: ") + e.what());
    return GGML_STATUS_FAILED;
  }
}

void set_threads(ggml_backend_t backend, int threads) { context_of(backend).threads = threads; }

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  context_of(backend).should_abort = callback;
  context_of(backend).abort_data = data;
}

// ---- device

const char* device_name(ggml_backend_dev_t device) {
  return device == &plugin().weights_device ? "minference-weights" : kRegistryName;
}
const char* device_description(ggml_backend_dev_t) { return "dynamic sparse attention"; }

void device_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
  *free = 0;
  *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
  return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  device_memory(device, &props->memory_free, &props->memory_total);
  props->caps = {};
  // Weights stay in the mapped file: no copy, as with llama.cpp's own plain buffers.
  props->caps.buffer_from_host_ptr = device == &plugin().weights_device;
}

// Of either device the backend is one of the computing device: it has the CPU's buffer type, so that
// results share the CPU backend's memory.
ggml_backend_t device_init_backend(ggml_backend_dev_t, const char*) noexcept {
  static ggml_guid guid = {0x6d, 0x69, 0x6e, 0x66, 0x65, 0x72, 0x65, 0x6e,
                           0x63, 0x65, 0x2d, 0x66, 0x61, 0x2d, 0x30, 0x31};
  try {
    auto context = std::make_unique<BackendContext>();
    auto backend = std::make_unique<ggml_backend>();
    backend->guid = &guid;
    backend->iface = {};
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = compute;
    backend->device = &plugin().device;
    backend->context = context.release();
    return backend.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
  return device == &plugin().weights_device ? &plugin().weights_type
                                            : plugin().api.cpu_buffer_type();
}

// ---- weights: plain host memory under a name of our own, which the CPU backend reads as well

const char* weights_type_name(ggml_backend_buffer_type_t) { return kRegistryName; }

ggml_backend_buffer_t weights_alloc(ggml_backend_buffer_type_t type, std::size_t size) {
  const ggml_backend_buffer_type_t cpu = plugin().api.cpu_buffer_type();
  ggml_backend_buffer_t buffer = cpu->iface.alloc_buffer(cpu, size);
  if (buffer != nullptr) buffer->buft = type;
  return buffer;
}

ggml_backend_buffer_t weights_from_pointer(ggml_backend_dev_t, void* data, std::size_t size,
                                           std::size_t) {
  ggml_backend_buffer_t buffer = plugin().api.cpu_buffer_from_ptr(data, size);
  if (buffer != nullptr) buffer->buft = &plugin().weights_type;
  return buffer;
}

std::size_t weights_alignment(ggml_backend_buffer_type_t) {
  const ggml_backend_buffer_type_t cpu = plugin().api.cpu_buffer_type();
  return cpu->iface.get_alignment(cpu);
}

bool weights_is_host(ggml_backend_buffer_type_t) { return true; }

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor* op) noexcept {
  const std::shared_ptr<const PluginConfig> config = plugin().config();
  if (op->op == GGML_OP_MUL_MAT) {
    return config->linear && !config->stock() &&
           takes_linear(op, config->isa, &plugin().weights_type);
  }
  if (device == &plugin().weights_device) return false;
  const RouteDecision decision = route_operation(op, *config);
  if (decision.route != Route::kDeclined) return decision.route == Route::kTaken;
  try {
    if (plugin().board.add_declined(decision.reason) && config->log != LogLevel::kQuiet) {
      say(std::string("prompt attention is left to llama.cpp: ") + decision.reason);
    }
  } catch (const std::exception&) {
    // Only the report is lost.
  }
  return false;
}

bool device_supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return plugin().api.buffer_type_is_host(type);
}

// ---- private entry points, plugin_api.h

const char* configure(const char* json) noexcept {
  thread_local std::string reason;
  try {
    plugin().set_config(config_from_json(json == nullptr ? "" : json));
    return nullptr;
  } catch (const std::exception& e) {
    reason = e.what();
    return reason.c_str();
  }
}

const char* stats() noexcept {
  thread_local std::string json;
  try {
    json = plugin().board.json();
    return json.c_str();
  } catch (const std::exception&) {
    return "{}";
  }
}

void reset_stats() noexcept { plugin().board.reset(); }

void set_rows_after(std::int64_t rows) noexcept { rows_after = std::max<std::int64_t>(rows, -1); }

void set_segments(const Segment* first, std::int64_t count) noexcept {
  segments = {first, static_cast<std::size_t>(std::max<std::int64_t>(count, 0))};
}

void set_observer(AttentionObserver observer, void* user) noexcept {
  plugin().set_observer({observer, user});
}

// ---- registry

const char* registry_name(ggml_backend_reg_t) { return kRegistryName; }
std::size_t registry_device_count(ggml_backend_reg_t) { return 2; }
ggml_backend_dev_t registry_device(ggml_backend_reg_t, std::size_t index) {
  return index == 0 ? &plugin().device : &plugin().weights_device;
}

void* registry_function(ggml_backend_reg_t, const char* name) {
  const auto is = [name](const char* wanted) { return std::strcmp(name, wanted) == 0; };
  if (is("ggml_backend_set_n_threads")) return reinterpret_cast<void*>(set_threads);
  if (is("ggml_backend_set_abort_callback")) return reinterpret_cast<void*>(set_abort_callback);
  if (is(kConfigureName)) return reinterpret_cast<void*>(configure);
  if (is(kStatsName)) return reinterpret_cast<void*>(stats);
  if (is(kResetStatsName)) return reinterpret_cast<void*>(reset_stats);
  if (is(kSetRowsAfterName)) return reinterpret_cast<void*>(set_rows_after);
  if (is(kSetSegmentsName)) return reinterpret_cast<void*>(set_segments);
  if (is(kSetObserverName)) return reinterpret_cast<void*>(set_observer);
  return nullptr;
}

void print_summary() {
  if (plugin().config()->log != LogLevel::kSummary) return;
  std::fputs(plugin().board.table().c_str(), stderr);
}

void fill_interfaces(Plugin& target) {
  target.device.iface.get_name = device_name;
  target.device.iface.get_description = device_description;
  target.device.iface.get_memory = device_memory;
  target.device.iface.get_type = device_type;
  target.device.iface.get_props = device_props;
  target.device.iface.init_backend = device_init_backend;
  target.device.iface.get_buffer_type = device_buffer_type;
  target.device.iface.supports_op = device_supports_op;
  target.device.iface.supports_buft = device_supports_buffer_type;
  target.device.reg = &target.registry;
  target.weights_device = target.device;
  target.weights_device.iface.buffer_from_host_ptr = weights_from_pointer;
  target.weights_type.iface.get_name = weights_type_name;
  target.weights_type.iface.alloc_buffer = weights_alloc;
  target.weights_type.iface.get_alignment = weights_alignment;
  target.weights_type.iface.is_host = weights_is_host;
  target.weights_type.device = &target.weights_device;
  target.registry.api_version = GGML_BACKEND_API_VERSION;
  target.registry.iface.get_name = registry_name;
  target.registry.iface.get_device_count = registry_device_count;
  target.registry.iface.get_device = registry_device;
  target.registry.iface.get_proc_address = registry_function;
}

}  // namespace

ggml_backend_reg_t start_plugin(const void* host_address) noexcept {
  try {
    HostApi api;
    std::string refusal = find_host_api(host_address, api);
    if (refusal.empty()) refusal = check_ggml_version(MINFERENCE_GGML_VERSION, api.version());
    if (!refusal.empty()) {
      say("error: " + refusal);
      return nullptr;
    }
    Plugin& self = plugin();
    const ggml_backend_reg_t registered = api.find_registry(kRegistryName);
    if (registered == &self.registry) return registered;
    if (registered != nullptr) {
      say("error: another copy of the plug-in is registered already");
      return nullptr;
    }
    const bool first = self.config() == nullptr;
    self.set_config(config_from_environment());
    self.api = api;
    fill_interfaces(self);
    if (self.config()->log != LogLevel::kQuiet) say(describe(*self.config()));
    if (first) std::atexit(print_summary);
    return &self.registry;
  } catch (const std::exception& e) {
    say(std::string("error: ") + e.what() + "; the plug-in stays out");
    return nullptr;
  }
}

}  // namespace minference::llama_host

// ggml looks this symbol up and calls it.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  return minference::llama_host::start_plugin(__builtin_return_address(0));
}
