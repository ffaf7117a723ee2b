#include "minference/method.h"

#include <charconv>
#include <cmath>
#include <sstream>

#include "attention/cuda/library.h"
#include "methods/method_table.h"
#include "minference/error.h"

namespace minference {
namespace {

// 64 rather than 64.000000, 0.5 rather than 0.500000.
std::string format_number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

// Whether a value inside the range is of the kind that the option takes.
bool fits(const MethodOption& option, double value) {
  if (!option.integer) return true;
  return value == std::floor(value) &&
         std::fmod(value, static_cast<double>(option.multiple_of)) == 0 &&
         (option.divisor_of == 0 || std::fmod(static_cast<double>(option.divisor_of), value) == 0);
}

}  // namespace

const std::vector<const Method*>& attention_methods() {
  static const std::vector<const Method*> methods = {&auto_method(),
                                                     &minference_method(),
                                                     &vertical_slash_method(),
                                                     &static_method(),
                                                     &block_sparse_method(),
                                                     &flexprefill_method(),
                                                     &xattention_method(),
                                                     &a_shape_method(),
                                                     &tri_shape_method(),
                                                     &dilated1_method(),
                                                     &dilated2_method(),
                                                     &tri_mix_method(),
                                                     &tri_mix_minference_method(),
                                                     &inf_llm_method(),
                                                     &mminference_method(),
                                                     &dense_method()};
  return methods;
}

const Method& find_method(std::string_view name) {
  for (const Method* method : attention_methods()) {
    if (name == method->name()) return *method;
    for (const char* alias : method->aliases()) {
      if (name == alias) return *method;
    }
  }
  throw InvalidArgument("unknown attention method '" + std::string(name) +
                        "'; valid methods: " + attention_method_names());
}

std::string attention_method_names() {
  std::string names;
  for (const Method* method : attention_methods()) {
    names += names.empty() ? "" : ", ";
    names += method->name();
    for (const char* alias : method->aliases()) names += " (" + std::string(alias) + ")";
  }
  return names;
}

MethodOptions resolve_options(const Method& method, const MethodOptions& given) {
  MethodOptions resolved;
  std::string names;
  for (const MethodOption& option : method.options()) {
    resolved[option.name] = option.default_value;
    names += names.empty() ? "" : ", ";
    names += option.name;
  }
  for (const auto& [name, value] : given) {
    if (resolved.find(name) == resolved.end()) {
      throw InvalidArgument("method " + std::string(method.name()) + " has no option '" + name +
                            "'; valid options: " + (names.empty() ? "none" : names));
    }
    resolved[name] = value;
  }
  for (const MethodOption& option : method.options()) {
    const double value = resolved[option.name];
    if (!(value >= option.min_value && value <= option.max_value) || !fits(option, value)) {
      throw InvalidArgument("option " + option.name + " of method " + method.name() + " is " +
                            format_number(value) + "; legal: " + legal_values(option));
    }
  }
  return resolved;
}

std::string legal_values(const MethodOption& option) {
  std::string kind = "whole numbers";
  if (!option.integer) kind = "numbers";
  if (option.multiple_of != 1) kind = "multiples of " + std::to_string(option.multiple_of);
  if (option.divisor_of != 0) kind = "divisors of " + std::to_string(option.divisor_of);
  return kind + " from " + format_number(option.min_value) + " to " +
         format_number(option.max_value);
}

void parse_option(std::string_view text, MethodOptions& options) {
  const std::size_t equals = text.find('=');
  const auto fail = [&] {
    throw InvalidArgument("'" + std::string(text) +
                          "' is not an option; expected key=number, for example vertical_size=500");
  };
  if (equals == std::string_view::npos || equals == 0) fail();
  const std::string_view number = text.substr(equals + 1);
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(value)) fail();
  options[std::string(text.substr(0, equals))] = value;
}

bool Method::reads_tensors(const MethodOptions&, const MethodContext&) const { return true; }

std::optional<IndexRecipe> Method::recipe(std::int64_t, const MethodOptions&,
                                          const MethodContext&) const {
  return std::nullopt;
}

namespace {

std::string cuda_method_names(std::int64_t q_heads, const MethodContext& context) {
  std::string names;
  for (const Method* method : attention_methods()) {
    const MethodOptions options = resolve_options(*method, {});
    if (method->reads_tensors(options, context) && !method->recipe(q_heads, options, context)) {
      continue;
    }
    names += (names.empty() ? "" : ", ") + std::string(method->name());
  }
  return names;
}

Stats method_on_cuda(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const Method& method,
                     const MethodOptions& options, const MethodContext& context) {
  if (context.guard.mode != GuardMode::kOff || context.on_index) {
    throw Unsupported("the guard and on_index work on the CPU only; tensors are on " +
                      device_name(input.q.device));
  }
  if (!method.reads_tensors(options, context)) {
    const SparseIndex index = method.build_index(input, params, options, context);
    return attention_cuda(input, params, output, &index);
  }
  const auto recipe = method.recipe(input.q.heads(), options, context);
  if (!recipe && &method == &auto_method()) {
    // What nobody chose must not fail, and exact attention is never wrong.
    Stats stats = attention_cuda(input, params, output, nullptr);
    stats.fallbacks["auto has no CUDA kernels yet, exact attention"] += 1;
    return stats;
  }
  if (!recipe) {
    throw Unsupported(
        "method " + std::string(method.name()) +
        " has no CUDA kernels; those that do: " + cuda_method_names(input.q.heads(), context));
  }
  return attention_cuda(input, params, output, *recipe);
}

}  // namespace

Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const Method& method, const MethodOptions& options,
                const MethodContext& context) {
  validate(input, params, output);
  Stats stats;
  if (!input.mask.empty() || !params.causal) {
    // Positions, and with them offsets, mean nothing under an arbitrary mask.
    resolve_options(method, options);
    stats = attention(input, params, output);
    stats.fallbacks[input.mask.empty() ? "not causal" : "mask is not a causal prefix"] += 1;
  } else if (input.q.device.kind == Device::Kind::kCuda) {
    stats =
        method_on_cuda(input, params, output, method, resolve_options(method, options), context);
  } else {
    SparseIndex index =
        method.build_index(input, params, resolve_options(method, options), context);
    guard(input, params, context.guard, index, stats);
    stats.add(attention(input, params, output, &index));
    stats.index_seconds = index.build_seconds;
    if (context.on_index) context.on_index(index);
  }
  stats.method = method.name();
  return stats;
}

}  // namespace minference
