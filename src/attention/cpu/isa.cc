#include "minference/isa.h"

#include <cstdlib>
#include <string>

#include "attention/cpu/kernel_table.h"
#include "minference/error.h"

namespace minference {
namespace {

constexpr IsaLevel kAllLevels[] = {IsaLevel::kGeneric,    IsaLevel::kAvx2,    IsaLevel::kAvx512,
                                   IsaLevel::kAvx512Bf16, IsaLevel::kAmxBf16, IsaLevel::kNeon,
                                   IsaLevel::kNeonBf16};

std::string join_names(const std::vector<IsaLevel>& levels) {
  std::string names;
  for (const IsaLevel level : levels) {
    if (!names.empty()) names += ", ";
    names += isa_name(level);
  }
  return names;
}

IsaLevel fastest(bool allow_bf16) {
  IsaLevel best = IsaLevel::kGeneric;
  for (const IsaLevel level : available_isa_levels()) {
    if ((allow_bf16 || !isa_is_bf16(level)) && cpu::cpu_prefers(level)) best = level;
  }
  return best;
}

}  // namespace

const char* isa_name(IsaLevel level) {
  switch (level) {
    case IsaLevel::kGeneric:
      return "generic";
    case IsaLevel::kAvx2:
      return "avx2";
    case IsaLevel::kAvx512:
      return "avx512";
    case IsaLevel::kAvx512Bf16:
      return "avx512_bf16";
    case IsaLevel::kAmxBf16:
      return "amx_bf16";
    case IsaLevel::kNeon:
      return "neon";
    case IsaLevel::kNeonBf16:
      break;
  }
  return "neon_bf16";
}

bool isa_is_bf16(IsaLevel level) {
  return level == IsaLevel::kAvx512Bf16 || level == IsaLevel::kAmxBf16 ||
         level == IsaLevel::kNeonBf16;
}

IsaLevel parse_isa(std::string_view name) {
  for (const IsaLevel level : kAllLevels) {
    if (name == isa_name(level)) return level;
  }
  throw InvalidArgument(
      "unknown ISA level '" + std::string(name) + "'; valid levels: " +
      join_names(std::vector<IsaLevel>(std::begin(kAllLevels), std::end(kAllLevels))));
}

std::vector<IsaLevel> compiled_isa_levels() {
  std::vector<IsaLevel> levels;
  for (const IsaLevel level : kAllLevels) {
    if (cpu::kernel_table(level) != nullptr) levels.push_back(level);
  }
  return levels;
}

std::vector<IsaLevel> available_isa_levels() {
  std::vector<IsaLevel> levels;
  for (const IsaLevel level : compiled_isa_levels()) {
    if (cpu::cpu_supports(level)) levels.push_back(level);
  }
  return levels;
}

IsaLevel choose_isa(bool allow_bf16) {
  const char* forced_name = std::getenv("MINFERENCE_FORCE_ISA");
  if (forced_name == nullptr || *forced_name == '\0') return fastest(allow_bf16);
  const IsaLevel forced = parse_isa(forced_name);
  bool available = false;
  for (const IsaLevel level : available_isa_levels()) available |= level == forced;
  if (!available) {
    throw Unsupported("MINFERENCE_FORCE_ISA=" + std::string(forced_name) +
                      ": this machine or build has only " + join_names(available_isa_levels()));
  }
  return allow_bf16 || !isa_is_bf16(forced) ? forced : fastest(false);
}

}  // namespace minference
