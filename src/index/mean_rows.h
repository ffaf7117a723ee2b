// mean_rows: the mean of several rows of a tensor, in f32.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/cpu/kernel_table.h"

namespace minference {

// means[d] = mean of element d of rows 0 ... n - 1, whose addresses address(i) gives. `rows`: memory
// for the addresses, reused from call to call.
template <class Address>
void mean_rows(const cpu::KernelTable& kernels, std::int64_t n, DType dtype, std::int64_t dim,
               std::vector<const void*>& rows, Address&& address, float* means) {
  rows.resize(n);
  for (std::int64_t i = 0; i < n; ++i) rows[i] = address(i);
  kernels.sum_rows(rows.data(), dtype, n, dim, means);
  const auto count = static_cast<float>(n);
  for (std::int64_t d = 0; d < dim; ++d) means[d] /= count;
}

}  // namespace minference
