#include "minference/method.h"

#include <charconv>
#include <cmath>

#include "attention/visible_keys.h"
#include "core/format_number.h"
#include "methods/head_rules.h"
#include "methods/method_index.h"
#include "methods/method_table.h"
#include "minference/error.h"

namespace minference {
namespace {

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

std::optional<IndexRecipe> Method::recipe(const AttentionInput&, const AttentionParams&,
                                          const MethodOptions&, const MethodContext&) const {
  return std::nullopt;
}

namespace {

std::string cuda_method_names(const AttentionInput& input, const AttentionParams& params,
                              MethodContext context) {
  context.segments = {};  // which nobody has checked
  std::string names;
  for (const Method* method : attention_methods()) {
    const MethodOptions options = resolve_options(*method, {});
    if (method->reads_tensors(options, context) &&
        !method->recipe(input, params, options, context)) {
      continue;
    }
    names += (names.empty() ? "" : ", ") + std::string(method->name());
  }
  return names;
}

// Throws Unsupported for rows that continue a sequence.
void require_first_chunks(const AttentionInput& input, const AttentionParams& params,
                          const Method& method) {
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const SequenceGeometry sequence(input, params, b);
    if (sequence.q_len > 0 && sequence.position(0) > 0) {
      throw Unsupported("method " + std::string(method.name()) + " got rows from position " +
                        std::to_string(sequence.position(0)) + " of sequence " + std::to_string(b) +
                        " on; legal on " + device_name(input.q.device) +
                        ", where no estimate is kept: chunks from position 0");
    }
  }
}

void find_on_cuda(const AttentionInput& input, const AttentionParams& params, const Method& method,
                  const MethodOptions& options, const MethodContext& context, MethodIndex& found) {
  found.guard = context.guard;
  if (!method.reads_tensors(options, context)) {
    found.index = method.build_index(input, params, options, context);
    return;
  }
  found.recipe = method.recipe(input, params, options, context);
  if (found.recipe) {
    if (found.recipe->first_chunks) require_first_chunks(input, params, method);
    return;
  }
  throw Unsupported(
      "method " + std::string(method.name()) +
      " has no CUDA kernels; those that do: " + cuda_method_names(input, params, context));
}

}  // namespace

MethodIndex find_index(const AttentionInput& input, const AttentionParams& params,
                       const Method& method, const MethodOptions& options,
                       const MethodContext& context) {
  MethodIndex found;
  const MethodOptions resolved = resolve_options(method, options);
  validate(context.guard);
  for (std::int64_t b = 0; b < input.q.batch(); ++b) rows_after(input, context, b);  // are legal
  if (input.q.device.kind == Device::Kind::kCuda && context.on_index) {
    throw Unsupported("on_index works on the CPU only; tensors are on " +
                      device_name(input.q.device));
  }
  if (!input.mask.empty() || !params.causal) {
    // Positions, and with them offsets, mean nothing under an arbitrary mask. Exact attention, which
    // the method dense is anyway.
    if (&method == &dense_method()) return found;
    found.stats.fallbacks[input.mask.empty() ? "not causal" : "mask is not a causal prefix"] += 1;
  } else if (input.q.device.kind == Device::Kind::kCuda) {
    find_on_cuda(input, params, method, resolved, context, found);
  } else {
    found.index = method.build_index(input, params, resolved, context);
    guard(input, params, context.guard, *found.index, found.stats);
    found.stats.index_seconds = found.index->build_seconds;
  }
  return found;
}

Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const Method& method, const MethodOptions& options,
                const MethodContext& context) {
  validate(input, params, output);
  const MethodIndex found = find_index(input, params, method, options, context);
  Stats stats = found.stats;
  if (input.q.device.kind == Device::Kind::kCuda) {
    stats.add(attention_cuda(input, params, output, found.source()));
  } else {
    stats.add(attention(input, params, output, found.index ? &*found.index : nullptr));
  }
  if (context.on_index && found.index) context.on_index(*found.index);
  stats.method = method.name();
  return stats;
}

}  // namespace minference
