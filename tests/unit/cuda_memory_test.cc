// What an index takes on a CUDA device, and the heads that are worked on at a time so that it stays
// within its limit. Needs no device.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda/head_parts.h"
#include "index/cuda/build_index.h"

namespace minference::test {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace)

Problem problem(std::int64_t tokens, int q_heads, int kv_heads, int dim = 128) {
  Problem result;
  result.batch = 1;
  result.q_tokens = static_cast<std::int32_t>(tokens);
  result.kv_tokens = static_cast<std::int32_t>(tokens);
  result.q_heads = q_heads;
  result.kv_heads = kv_heads;
  result.group = q_heads / kv_heads;
  result.dim = dim;
  result.v_dim = dim;
  result.scale = 1;
  return result;
}

using Bytes = std::int64_t (*)(const Problem&);
const std::pair<const char*, Bytes> kMethods[] = {
    {"block_sparse", [](const Problem& p) { return block_sparse_index_bytes(p, 100); }},
    {"xattention", [](const Problem& p) { return antidiagonal_index_bytes(p, {}); }},
    {"flexprefill",
     [](const Problem& p) {
       FlexPrefillRule rule;
       rule.max_blocks = p.kv_tokens / rule.block_size;
       return flexprefill_index_bytes(p, rule);
     }},
};

// What the largest part takes.
std::int64_t bytes_at_a_time(const Problem& whole, Bytes bytes) {
  const HeadParts parts(whole, index_memory_limit(whole), bytes);
  return bytes(problem_of(whole, {0, parts.heads_at_a_time()}));
}

TEST(CudaIndexMemory, LimitIsAHundredthOfKeysAndValues) {
  EXPECT_EQ(index_memory_limit(problem(0, 32, 8)), 64 << 20);
  // 2 tensors of 1M * 8 * 128 elements of 2 bytes.
  EXPECT_EQ(index_memory_limit(problem(1 << 20, 32, 8)),
            (64 << 20) + (std::int64_t{4} << 30) / 100);
}

TEST(CudaIndexMemory, BlockMethodsStayWithinIt) {
  for (const auto& [name, bytes] : kMethods) {
    for (std::int64_t tokens = 8192; tokens <= 4 << 20; tokens *= 2) {
      const Problem whole = problem(tokens, 32, 8);
      EXPECT_LE(bytes_at_a_time(whole, bytes), index_memory_limit(whole)) << name << " " << tokens;
    }
    for (const auto& [q_heads, kv_heads] : {std::pair{32, 32}, {28, 4}, {64, 8}, {32, 1}}) {
      for (const std::int64_t tokens : {8192, 100000, 1 << 20}) {
        const Problem whole = problem(tokens, q_heads, kv_heads);
        EXPECT_LE(bytes_at_a_time(whole, bytes), index_memory_limit(whole))
            << name << " " << tokens << ", " << q_heads << "/" << kv_heads;
      }
    }
  }
}

TEST(CudaIndexMemory, AllHeadsAtOnceWhereTheyFit) {
  for (const auto& [name, bytes] : kMethods) {
    for (const std::int64_t tokens : {8192, 131072}) {
      const Problem whole = problem(tokens, 32, 8);
      const HeadParts parts(whole, index_memory_limit(whole), bytes);
      EXPECT_EQ(parts.heads_at_a_time(), 32) << name << " " << tokens;
    }
  }
}

TEST(CudaHeadParts, EveryHeadOnceAndNoPartAcrossGroups) {
  for (const auto& [q_heads, kv_heads] :
       {std::pair{32, 8}, {28, 4}, {7, 1}, {6, 6}, {1, 1}, {15, 5}}) {
    const Problem whole = problem(1000, q_heads, kv_heads);
    for (std::int64_t limit = 0; limit <= q_heads; ++limit) {
      const HeadParts parts(whole, limit, [](const Problem& part) { return part.q_heads; });
      EXPECT_LE(parts.heads_at_a_time(), std::max<std::int64_t>(limit, 1));
      int next = 0;
      parts.for_each([&](const HeadPart& part) {
        EXPECT_EQ(part.first, next);
        EXPECT_GE(part.count, 1);
        next += part.count;
        const Problem of_part = problem_of(whole, part);
        EXPECT_EQ(of_part.q_heads, part.count);
        EXPECT_EQ(of_part.kv_heads * of_part.group, part.count);
        if (part.count >= whole.group) {
          EXPECT_EQ(part.first % whole.group, 0);
          EXPECT_EQ(of_part.group, whole.group);
        } else {
          EXPECT_EQ(part.first / whole.group, (next - 1) / whole.group);
        }
      });
      EXPECT_EQ(next, q_heads);
    }
  }
}

TEST(CudaHeadParts, PointersAreThoseOfTheHeads) {
  std::vector<char> memory(4096);
  std::vector<float> sinks(8);
  Problem whole = problem(16, 8, 4, 8);
  int place = 0;
  for (DeviceTensor* tensor : {&whole.q, &whole.k, &whole.v, &whole.out, &whole.lse}) {
    tensor->data = memory.data() + 100 * place++;
    tensor->head_stride = 8;
  }
  whole.lse.dtype = DType::kF32;
  whole.lse.head_stride = 1;
  whole.sinks = sinks.data();
  const Problem two = problem_of(whole, {4, 2});
  EXPECT_EQ(two.q.data - whole.q.data, 4 * 8 * 2);
  EXPECT_EQ(two.out.data - whole.out.data, 4 * 8 * 2);
  EXPECT_EQ(two.k.data - whole.k.data, 2 * 8 * 2);
  EXPECT_EQ(two.v.data - whole.v.data, 2 * 8 * 2);
  EXPECT_EQ(two.lse.data - whole.lse.data, 4 * 4);
  EXPECT_EQ(two.sinks - whole.sinks, 4);
  EXPECT_EQ(two.kv_heads, 1);
  whole.lse.data = nullptr;
  const Problem one = problem_of(whole, {5, 1});
  EXPECT_EQ(one.k.data - whole.k.data, 2 * 8 * 2);
  EXPECT_EQ(one.group, 1);
  EXPECT_EQ(one.lse.data, nullptr);
}

}  // namespace
}  // namespace minference::test
