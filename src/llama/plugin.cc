// The ggml backend: registry, device and backend objects around compute_flash_attention().
//
// The device is of type ACCEL, which llama.cpp ranks above the CPU, reports the CPU's own buffer
// type and accepts every host buffer: the scheduler then hands it each operation that it claims,
// without copies. ggml's structures here come from a private header, hence the version check.
#include "llama/plugin.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "llama/ggml_guard.h"
#include "llama/plugin_api.h"
#include "llama/plugin_attention.h"
#include "llama/plugin_config.h"
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

  std::shared_ptr<const PluginConfig> config() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return config_;
  }
  void set_config(PluginConfig config) {
    auto shared = std::make_shared<const PluginConfig>(std::move(config));
    const std::lock_guard<std::mutex> lock(mutex_);
    config_ = std::move(shared);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const PluginConfig> config_;
};

Plugin& plugin() {
  static Plugin* const instance = new Plugin;
  return *instance;
}

void say(const std::string& text) { std::fprintf(stderr, "minference: %s\n", text.c_str()); }

// ---- backend: one per llama_context

struct BackendContext {
  int threads = 0;
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
    const BackendContext& context = context_of(backend);
    const std::shared_ptr<const PluginConfig> config = plugin().config();
    const int count = plugin().api.graph_node_count(graph);
    for (int i = 0; i < count; ++i) {
      ggml_tensor* node = plugin().api.graph_node(graph, i);
      // Views need no work, and are all that route_operation() did not take.
      if (node->op != GGML_OP_FLASH_ATTN_EXT || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
        continue;
      }
      if (context.should_abort != nullptr && context.should_abort(context.abort_data)) {
        return GGML_STATUS_ABORTED;
      }
      compute_flash_attention(node, *config, context.threads, plugin().board);
    }
    return GGML_STATUS_SUCCESS;
  } catch (const std::bad_alloc&) {
    say("error: out of memory in attention");
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

const char* device_name(ggml_backend_dev_t) { return kRegistryName; }
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
}

ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char*) noexcept {
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
    backend->device = device;
    backend->context = context.release();
    return backend.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
  return plugin().api.cpu_buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor* op) noexcept {
  const std::shared_ptr<const PluginConfig> config = plugin().config();
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

// ---- registry

const char* registry_name(ggml_backend_reg_t) { return kRegistryName; }
std::size_t registry_device_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t registry_device(ggml_backend_reg_t, std::size_t) { return &plugin().device; }

void* registry_function(ggml_backend_reg_t, const char* name) {
  const auto is = [name](const char* wanted) { return std::strcmp(name, wanted) == 0; };
  if (is("ggml_backend_set_n_threads")) return reinterpret_cast<void*>(set_threads);
  if (is("ggml_backend_set_abort_callback")) return reinterpret_cast<void*>(set_abort_callback);
  if (is(kConfigureName)) return reinterpret_cast<void*>(configure);
  if (is(kStatsName)) return reinterpret_cast<void*>(stats);
  if (is(kResetStatsName)) return reinterpret_cast<void*>(reset_stats);
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
