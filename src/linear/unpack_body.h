// The unpackers themselves: plain loops that compilers vectorise, compiled once per ISA level.
//
// Included by unpack_<level>.cc only, each with its own flags; everything has internal linkage.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "linear/unpack.h"

namespace minference {
namespace {

float half_at(const std::uint8_t* block) {
  std::uint16_t bits;
  std::memcpy(&bits, block, sizeof(bits));
  return f16_to_f32(bits);
}

void unpack_f32(const void* data, std::int64_t blocks, float* out) {
  std::memcpy(out, data, static_cast<std::size_t>(blocks) * sizeof(float));
}

void unpack_bf16(const void* data, std::int64_t blocks, float* out) {
  const auto* in = static_cast<const std::uint16_t*>(data);
  for (std::int64_t i = 0; i < blocks; ++i) out[i] = bf16_to_f32(in[i]);
}

#if defined(__F16C__)
void unpack_f16(const void* data, std::int64_t blocks, float* out) {
  const auto* in = static_cast<const std::uint16_t*>(data);
  std::int64_t i = 0;
  for (; i + 8 <= blocks; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  for (; i < blocks; ++i) out[i] = f16_to_f32(in[i]);
}
#elif defined(__aarch64__)
void unpack_f16(const void* data, std::int64_t blocks, float* out) {
  const auto* in = static_cast<const std::uint16_t*>(data);
  std::int64_t i = 0;
  for (; i + 4 <= blocks; i += 4) {
    vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(in + i))));
  }
  for (; i < blocks; ++i) out[i] = f16_to_f32(in[i]);
}
#else
void unpack_f16(const void* data, std::int64_t blocks, float* out) {
  const auto* in = static_cast<const std::uint16_t*>(data);
  for (std::int64_t i = 0; i < blocks; ++i) out[i] = f16_to_f32(in[i]);
}
#endif

// {f16 d; u8 q[16]}: low nibbles first, (q - 8) * d
void unpack_q4_0(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 18, out += 32) {
    const float d = half_at(block);
    const std::uint8_t* q = block + 2;
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<float>((q[i] & 0xF) - 8) * d;
      out[i + 16] = static_cast<float>((q[i] >> 4) - 8) * d;
    }
  }
}

// {f16 d; f16 m; u8 q[16]}: q * d + m
void unpack_q4_1(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 20, out += 32) {
    const float d = half_at(block);
    const float m = half_at(block + 2);
    const std::uint8_t* q = block + 4;
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<float>(q[i] & 0xF) * d + m;
      out[i + 16] = static_cast<float>(q[i] >> 4) * d + m;
    }
  }
}

// The fifth bits of a block of 32 as bytes 0 or 16.
void fifth_bits(const std::uint8_t* packed, std::uint8_t* bits) {
  std::uint32_t word;
  std::memcpy(&word, packed, sizeof(word));
  for (int i = 0; i < 32; ++i) bits[i] = static_cast<std::uint8_t>((word >> i & 1U) << 4);
}

// {f16 d; u8 high[4]; u8 q[16]}: (q - 16) * d
void unpack_q5_0(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 22, out += 32) {
    const float d = half_at(block);
    std::uint8_t high[32];
    fifth_bits(block + 2, high);
    const std::uint8_t* q = block + 6;
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<float>(((q[i] & 0xF) | high[i]) - 16) * d;
      out[i + 16] = static_cast<float>(((q[i] >> 4) | high[i + 16]) - 16) * d;
    }
  }
}

// {f16 d; f16 m; u8 high[4]; u8 q[16]}: q * d + m
void unpack_q5_1(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 24, out += 32) {
    const float d = half_at(block);
    const float m = half_at(block + 2);
    std::uint8_t high[32];
    fifth_bits(block + 4, high);
    const std::uint8_t* q = block + 8;
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<float>((q[i] & 0xF) | high[i]) * d + m;
      out[i + 16] = static_cast<float>((q[i] >> 4) | high[i + 16]) * d + m;
    }
  }
}

// {f16 d; i8 q[32]}
void unpack_q8_0(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 34, out += 32) {
    const float d = half_at(block);
    const auto* q = reinterpret_cast<const std::int8_t*>(block + 2);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(q[i]) * d;
  }
}

// Scales and minima of the eight groups of a q4_K or q5_K block: 6 bits each, in 12 bytes.
void six_bit_scales(const std::uint8_t* packed, std::uint8_t* scales, std::uint8_t* minima) {
  for (int i = 0; i < 4; ++i) {
    scales[i] = packed[i] & 63;
    minima[i] = packed[i + 4] & 63;
    scales[i + 4] = static_cast<std::uint8_t>((packed[i + 8] & 0xF) | (packed[i] >> 6 << 4));
    minima[i + 4] = static_cast<std::uint8_t>((packed[i + 8] >> 4) | (packed[i + 4] >> 6 << 4));
  }
}

// {f16 d; f16 dmin; u8 scales[12]; u8 q[128]}: d * scale * q - dmin * minimum, groups of 32
void unpack_q4_k(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 144) {
    const float d = half_at(block);
    const float dmin = half_at(block + 2);
    std::uint8_t scales[8];
    std::uint8_t minima[8];
    six_bit_scales(block + 4, scales, minima);
    const std::uint8_t* q = block + 16;
    for (int group = 0; group < 8; group += 2, q += 32, out += 64) {
      const float d0 = d * static_cast<float>(scales[group]);
      const float m0 = dmin * static_cast<float>(minima[group]);
      const float d1 = d * static_cast<float>(scales[group + 1]);
      const float m1 = dmin * static_cast<float>(minima[group + 1]);
      for (int i = 0; i < 32; ++i) out[i] = d0 * static_cast<float>(q[i] & 0xF) - m0;
      for (int i = 0; i < 32; ++i) out[i + 32] = d1 * static_cast<float>(q[i] >> 4) - m1;
    }
  }
}

// {f16 d; f16 dmin; u8 scales[12]; u8 high[32]; u8 q[128]}: as q4_K with a fifth bit
void unpack_q5_k(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 176) {
    const float d = half_at(block);
    const float dmin = half_at(block + 2);
    std::uint8_t scales[8];
    std::uint8_t minima[8];
    six_bit_scales(block + 4, scales, minima);
    const std::uint8_t* high = block + 16;
    const std::uint8_t* q = block + 48;
    for (int group = 0; group < 8; group += 2, q += 32, out += 64) {
      const float d0 = d * static_cast<float>(scales[group]);
      const float m0 = dmin * static_cast<float>(minima[group]);
      const float d1 = d * static_cast<float>(scales[group + 1]);
      const float m1 = dmin * static_cast<float>(minima[group + 1]);
      for (int i = 0; i < 32; ++i) {
        const int bit = high[i] >> group & 1;
        out[i] = d0 * static_cast<float>((q[i] & 0xF) + 16 * bit) - m0;
      }
      for (int i = 0; i < 32; ++i) {
        const int bit = high[i] >> (group + 1) & 1;
        out[i + 32] = d1 * static_cast<float>((q[i] >> 4) + 16 * bit) - m1;
      }
    }
  }
}

// {u8 low[128]; u8 high[64]; i8 scales[16]; f16 d}: d * scale * (q - 32), groups of 16
void unpack_q6_k(const void* data, std::int64_t blocks, float* out) {
  const auto* block = static_cast<const std::uint8_t*>(data);
  for (; blocks > 0; --blocks, block += 210) {
    const float d = half_at(block + 208);
    const std::uint8_t* low = block;
    const std::uint8_t* high = block + 128;
    const auto* scales = reinterpret_cast<const std::int8_t*>(block + 192);
    for (int half = 0; half < 2; ++half, low += 64, high += 32, scales += 8, out += 128) {
      for (int part = 0; part < 4; ++part) {
        const std::uint8_t* from = low + (part % 2) * 32;
        const int shift = part / 2 * 4;
        for (int group = 0; group < 2; ++group) {
          const float scale = d * static_cast<float>(scales[part * 2 + group]);
          for (int i = group * 16; i < group * 16 + 16; ++i) {
            const int q = (from[i] >> shift & 0xF) | ((high[i] >> (2 * part) & 3) << 4);
            out[part * 32 + i] = scale * static_cast<float>(q - 32);
          }
        }
      }
    }
  }
}

UnpackBlocksFn body_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return unpack_f32;
    case WeightFormat::kF16:
      return unpack_f16;
    case WeightFormat::kBF16:
      return unpack_bf16;
    case WeightFormat::kQ4_0:
      return unpack_q4_0;
    case WeightFormat::kQ4_1:
      return unpack_q4_1;
    case WeightFormat::kQ5_0:
      return unpack_q5_0;
    case WeightFormat::kQ5_1:
      return unpack_q5_1;
    case WeightFormat::kQ8_0:
      return unpack_q8_0;
    case WeightFormat::kQ4K:
      return unpack_q4_k;
    case WeightFormat::kQ5K:
      return unpack_q5_k;
    case WeightFormat::kQ6K:
      break;
  }
  return unpack_q6_k;
}

}  // namespace
}  // namespace minference
