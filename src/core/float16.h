// Conversions between f32 and the 16-bit floating-point formats, and dtype-generic element access.
#pragma once

#include <bit>
#include <cstdint>

#include "minference/tensor.h"

namespace minference {

// IEEE binary16 to f32; exact.
inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1FU;
  const std::uint32_t mantissa = h & 0x3FFU;
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  }
  // Subnormal: mantissa * 2^-24, which f32 represents exactly.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

// f32 to IEEE binary16, round to nearest even; overflow gives infinity, NaN stays NaN.
inline std::uint16_t f32_to_f16(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (magnitude < 0x38800000U) {
    // Result is subnormal or zero: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1U;
  const std::uint32_t rounded = magnitude - 0x38000000U + 0xFFFU + odd;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// bfloat16 to f32; exact.
inline float bf16_to_f32(std::uint16_t h) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

// f32 to bfloat16, round to nearest even; NaN stays (quiet) NaN.
inline std::uint16_t f32_to_bf16(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// Element i of an array of `dtype` as f32; exact.
inline float load_element(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF16:
      return f16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case DType::kBF16:
      break;
  }
  return bf16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
}

// Rounds `value` to `dtype` and stores it as element i.
inline void store_element(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = value;
      return;
    case DType::kF16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_f16(value);
      return;
    case DType::kBF16:
      static_cast<std::uint16_t*>(data)[i] = f32_to_bf16(value);
      return;
  }
}

}  // namespace minference
