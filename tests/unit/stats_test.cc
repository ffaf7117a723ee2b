#include <gtest/gtest.h>

#include "minference/attention.h"

namespace minference {
namespace {

TEST(Stats, KeptFractionOfNothingIsOne) {
  Stats stats;
  EXPECT_EQ(stats.kept_fraction(), 1.0);
  stats.causal_pairs = 8;
  stats.kept_pairs = 2;
  EXPECT_EQ(stats.kept_fraction(), 0.25);
}

TEST(Stats, AddSumsFiguresAndFallbacks) {
  Stats total;
  Stats call;
  call.method = "vertical_slash";
  call.isa = IsaLevel::kAvx2;
  call.kept_pairs = 1;
  call.causal_pairs = 4;
  call.index_seconds = 0.5;
  call.kernel_seconds = 0.25;
  call.fallbacks["mask"] = 1;
  total.add(call);
  EXPECT_EQ(total.method, "vertical_slash");
  EXPECT_EQ(total.isa, IsaLevel::kAvx2);
  call.fallbacks["short"] = 2;
  total.add(call);
  EXPECT_EQ(total.method, "vertical_slash");
  EXPECT_EQ(total.kept_pairs, 2);
  EXPECT_EQ(total.causal_pairs, 8);
  EXPECT_EQ(total.index_seconds, 1.0);
  EXPECT_EQ(total.kernel_seconds, 0.5);
  EXPECT_EQ(total.fallbacks["mask"], 2);
  EXPECT_EQ(total.fallbacks["short"], 2);
}

TEST(Stats, AddNamesEveryMethodOnceAndTheSlowestLevel) {
  Stats total;
  for (const char* method : {"vertical_slash", "dense", "vertical_slash", "dense", "a_shape"}) {
    Stats call;
    call.method = method;
    call.isa = method[0] == 'd' ? IsaLevel::kGeneric : IsaLevel::kAvx512;
    total.add(call);
  }
  total.add(Stats());
  EXPECT_EQ(total.method, "vertical_slash+dense+a_shape");
  EXPECT_EQ(total.isa, IsaLevel::kGeneric);
}

TEST(Stats, KernelsOfADeviceAreNamed) {
  Stats device;
  device.method = "dense";
  device.isa = IsaLevel::kAvx512;
  EXPECT_STREQ(device.kernels(), "avx512");
  device.cuda_kernels = 90;
  EXPECT_STREQ(device.kernels(), "sm_90a");
  Stats older = device;
  older.cuda_kernels = 80;
  Stats total;
  total.add(device);
  EXPECT_STREQ(total.kernels(), "sm_90a");
  total.add(older);
  EXPECT_STREQ(total.kernels(), "sm_80");
}

}  // namespace
}  // namespace minference
