// The neon level: f32 products with fused multiply-add, part of every 64-bit Arm processor.
#include "attention/cpu/vec_neon.h"

namespace minference::cpu {
namespace {

struct NeonIsa : F32Isa<NeonVector> {
  static void transpose_16(const Elem* in, std::int64_t dim, Elem* out) {
    transpose_words_16(in, dim, out);
  }
};

}  // namespace

const KernelTable& neon_kernels() {
  static const KernelTable table = make_kernel_table<NeonIsa>(IsaLevel::kNeon);
  return table;
}

}  // namespace minference::cpu
