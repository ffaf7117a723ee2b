// The avx512 level: f32 products with AVX-512.
#include "attention/cpu/vec_avx512.h"

namespace minference::cpu {
namespace {

struct Avx512Isa : F32Isa<Avx512Vector> {
  static void transpose_16(const Elem* in, std::int64_t dim, Elem* out) {
    for (std::int64_t d = 0; d < dim; d += 16) transpose_words_16(in + d, dim, out + d * 16, 16);
  }
};

}  // namespace

const KernelTable& avx512_kernels() {
  static const KernelTable table = make_kernel_table<Avx512Isa>(IsaLevel::kAvx512);
  return table;
}

}  // namespace minference::cpu
