#include "attention/cpu/non_finite_values.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace minference::cpu {

bool all_finite(const float* values, std::int64_t n) {
  return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

NonFiniteValues::NonFiniteValues(const KernelTable& kernels, std::int64_t v_dim)
    : element_size_(kernels.element_size),
      v_dim_(v_dim),
      copies_(kBatchKeys * v_dim * kernels.element_size),
      positive_(v_dim),
      negative_(v_dim),
      seen_positive_(kTileRows * v_dim),
      seen_negative_(kTileRows * v_dim) {}

// Word: unsigned integer of the size of a packed element, bf16 or f32.
template <class Word>
void NonFiniteValues::take_out_granule(const void* values, void* copy) {
  constexpr int kLowBits = 8 * (sizeof(Word) - sizeof(std::uint16_t));
  constexpr auto kExponent = static_cast<Word>(Word{0x7F80} << kLowBits);
  constexpr auto kSign = static_cast<Word>(Word{0x8000} << kLowBits);
  constexpr std::int64_t kPair = sizeof(Word) == sizeof(std::uint16_t) ? 2 : 1;
  std::fill(positive_.begin(), positive_.end(), 0U);
  std::fill(negative_.begin(), negative_.end(), 0U);
  keys_ = 0;
  const auto* from = static_cast<const Word*>(values);
  auto* to = static_cast<Word*>(copy);
  for (std::int64_t panel = 0; panel < v_dim_; panel += kPanelWidth) {
    for (std::int64_t i = 0; i < kKeyGranule * kPanelWidth; ++i) {
      const Word word = *from++;
      const bool finite = (word & kExponent) != kExponent;
      *to++ = finite ? word : Word{0};
      if (finite) continue;
      // Values are packed [32 / pair][16][pair].
      const std::int64_t key = i / (kPanelWidth * kPair) * kPair + i % kPair;
      const std::int64_t d = panel + i / kPair % kPanelWidth;
      const bool nan = (word & ~(kExponent | kSign)) != 0;
      const std::uint32_t bit = 1U << key;
      if (nan || (word & kSign) == 0) positive_[d] |= bit;
      if (nan || (word & kSign) != 0) negative_[d] |= bit;
      keys_ |= bit;
    }
  }
}

void NonFiniteValues::take_out(KeyBatch& batch, std::int64_t rows) {
  if (!batch.masked) return;  // every row sees all of it
  for (std::int64_t g = 0; g < batch.granules; ++g) {
    std::byte* copy = copies_.data() + g * kKeyGranule * v_dim_ * element_size_;
    if (element_size_ == sizeof(std::uint16_t)) {
      take_out_granule<std::uint16_t>(batch.values[g], copy);
    } else {
      take_out_granule<std::uint32_t>(batch.values[g], copy);
    }
    batch.values[g] = copy;
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto visible =
          static_cast<std::uint32_t>(batch.mask[r][g / 2] >> (g % 2 * kKeyGranule));
      if ((visible & keys_) == 0) continue;
      for (std::int64_t d = 0; d < v_dim_; ++d) {
        seen_positive_[r * v_dim_ + d] |= visible & positive_[d];
        seen_negative_[r * v_dim_ + d] |= visible & negative_[d];
      }
    }
  }
}

void NonFiniteValues::put_back(RowBlock& block) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < block.rows * v_dim_; ++i) {
    if (seen_positive_[i] != 0) block.acc[i] += kInfinity;
    if (seen_negative_[i] != 0) block.acc[i] -= kInfinity;
  }
}

}  // namespace minference::cpu
