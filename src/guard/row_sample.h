// RowSample: which query rows of a sequence the guard looks at, on every device.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace minference {

// One in rows_per_sample, at least one and at most `rows`; spread evenly, the last one among them.
struct RowSample {
  std::int64_t rows = 16;  // 1 to kMaxGuardRows
  std::int64_t rows_per_sample = 1;

  MINFERENCE_HOST_DEVICE std::int64_t count(std::int64_t q_len) const {
    const std::int64_t most = q_len / rows_per_sample;
    if (q_len <= 1 || most <= 1) return q_len < 1 ? 0 : 1;
    return most < rows ? most : rows;
  }
  // The i-th of `count` rows.
  MINFERENCE_HOST_DEVICE static std::int64_t row(std::int64_t i, std::int64_t count,
                                                 std::int64_t q_len) {
    return q_len * (i + 1) / count - 1;
  }
};

}  // namespace minference
