#include "linear/unpack.h"

namespace minference {

UnpackBlocksFn unpacker_generic(WeightFormat format);
UnpackBlocksFn unpacker_avx2(WeightFormat format);
UnpackBlocksFn unpacker_avx512(WeightFormat format);

std::int64_t block_elements(WeightFormat format) {
  if (format <= WeightFormat::kBF16) return 1;
  return format <= WeightFormat::kQ8_0 ? 32 : 256;
}

std::int64_t block_bytes(WeightFormat format) {
  constexpr std::int64_t kBytes[] = {4, 2, 2, 18, 20, 22, 24, 34, 144, 176, 210};
  return kBytes[static_cast<int>(format)];
}

UnpackBlocksFn unpacker(WeightFormat format, IsaLevel level) {
  switch (level) {
#ifdef MINFERENCE_HAVE_ISA_AVX512
    case IsaLevel::kAvx512:
    case IsaLevel::kAvx512Bf16:
    case IsaLevel::kAmxBf16:
      return unpacker_avx512(format);
#endif
#ifdef MINFERENCE_HAVE_ISA_AVX2
    case IsaLevel::kAvx2:
      return unpacker_avx2(format);
#endif
    default:
      return unpacker_generic(format);
  }
}

}  // namespace minference
