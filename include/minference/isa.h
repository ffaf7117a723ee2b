// Instruction-set levels of the CPU kernels: which exist, which this machine can run, which one is used.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace minference {

// Ordered from the most portable to the fastest within a processor family (x86-64: kAvx2 to
// kAmxBf16, aarch64: kNeon and kNeonBf16); between families the order means nothing. Levels named
// Bf16 multiply bf16 pairs and accumulate in f32, the others compute in f32.
enum class IsaLevel : std::uint8_t {
  kGeneric,
  kAvx2,
  kAvx512,
  kAvx512Bf16,
  kAmxBf16,
  kNeon,
  kNeonBf16
};

// "generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16".
const char* isa_name(IsaLevel level);

// True when the level multiplies in bf16 (its inputs are rounded to bf16).
bool isa_is_bf16(IsaLevel level);

// The level with this name. Throws InvalidArgument listing the valid names.
IsaLevel parse_isa(std::string_view name);

// Levels compiled into this library, ascending.
std::vector<IsaLevel> compiled_isa_levels();

// Compiled levels that this processor and kernel can run, ascending. Never empty.
std::vector<IsaLevel> available_isa_levels();

// The level used where a bf16 level is acceptable, respectively where f32 accuracy is asked for: the
// fastest available one, or the one that the environment variable MINFERENCE_FORCE_ISA names. With
// f32 accuracy a forced bf16 level falls to the fastest f32 level. Throws InvalidArgument when the
// variable names an unknown level and Unsupported when this machine cannot run it.
IsaLevel choose_isa(bool allow_bf16);

}  // namespace minference
