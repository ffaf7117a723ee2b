// The mask reader: runs and bits against the mask itself, for every kind of mask that llama.cpp
// makes.
#include "llama/plugin_mask.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "minference/error.h"

namespace minference::llama_host {
namespace {

constexpr std::uint16_t kSeen = 0x0000;
constexpr std::uint16_t kMinusZero = 0x8000;
constexpr std::uint16_t kHidden = 0xFC00;
constexpr std::uint16_t kOne = 0x3C00;

class Mask {
 public:
  // Rows lie `padding` elements further apart than they are long; the padding holds a poison value.
  Mask(std::int64_t rows, std::int64_t keys,
       const std::function<bool(std::int64_t, std::int64_t)>& sees, std::int64_t padding = 0)
      : rows_(rows), keys_(keys), stride_(keys + padding), data_(rows * (keys + padding), kOne) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) at(i, j) = sees(i, j) ? kSeen : kHidden;
    }
  }
  std::uint16_t& at(std::int64_t i, std::int64_t j) { return data_[i * stride_ + j]; }
  bool sees(std::int64_t i, std::int64_t j) { return (at(i, j) & 0x7FFF) == 0; }
  MaskView view() const { return {data_.data(), rows_, keys_, stride_}; }
  std::int64_t rows() const { return rows_; }
  std::int64_t keys() const { return keys_; }

 private:
  std::int64_t rows_;
  std::int64_t keys_;
  std::int64_t stride_;
  std::vector<std::uint16_t> data_;
};

// Reads the mask and proves that the runs say the same as the mask.
std::vector<RowRun> read_checked(Mask& mask, int threads = 2) {
  const std::vector<RowRun> runs = read_mask(mask.view(), threads);
  std::int64_t next = 0;
  for (const RowRun& run : runs) {
    EXPECT_EQ(run.first_row, next);
    next += run.rows;
    std::vector<std::uint64_t> bits;
    const std::int64_t words = (run.key_end - run.key_begin + 63) / 64;
    if (!run.causal) bits = mask_bits(mask.view(), run, threads);
    for (std::int64_t i = 0; i < run.rows; ++i) {
      for (std::int64_t j = 0; j < mask.keys(); ++j) {
        bool sees = j >= run.key_begin && j < run.key_end;
        if (run.causal) {
          sees = sees && j < run.key_end - run.rows + 1 + i;
        } else if (sees) {
          const std::int64_t offset = j - run.key_begin;
          sees = (bits[i * words + offset / 64] >> (offset % 64) & 1) != 0;
        }
        if (sees != mask.sees(run.first_row + i, j)) {
          ADD_FAILURE() << "row " << run.first_row + i << ", key " << j << ": run says " << sees;
          return runs;
        }
      }
    }
  }
  EXPECT_EQ(next, mask.rows());
  return runs;
}

TEST(Mask, FirstPrefillIsOneCausalRun) {
  Mask mask(100, 256, [](auto i, auto j) { return j <= i; });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_TRUE(runs[0].causal);
  EXPECT_EQ(runs[0].key_end, 100);
}

TEST(Mask, LaterChunkIsOneCausalRun) {
  Mask mask(
      64, 1024, [](auto i, auto j) { return j <= 700 + i; }, 8);
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_TRUE(runs[0].causal);
  EXPECT_EQ(runs[0].key_end, 764);
}

TEST(Mask, MinusZeroIsVisible) {
  Mask mask(64, 256, [](auto i, auto j) { return j <= i; });
  mask.at(10, 3) = kMinusZero;
  EXPECT_TRUE(read_checked(mask)[0].causal);
}

TEST(Mask, SequencesInOneCacheAreOneRunEach) {
  // Rows 0-39 are a sequence over the keys 0-139, rows 40-99 another over the keys 140-399.
  Mask mask(100, 512,
            [](auto i, auto j) { return i < 40 ? j <= 100 + i : j >= 140 && j <= 340 + (i - 40); });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_TRUE(runs[0].causal);
  EXPECT_TRUE(runs[1].causal);
  EXPECT_EQ(runs[1].key_begin, 140);
}

TEST(Mask, DecodingRowsBesideAPromptAreOneMaskedRun) {
  // Three slots decode (one row each), one slot reads a prompt.
  Mask mask(103, 1024, [](auto i, auto j) {
    return i < 3 ? j >= 200 * i && j < 200 * i + 150 : j >= 600 && j <= 700 + i;
  });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_FALSE(runs[0].causal);
  EXPECT_EQ(runs[0].rows, 3);
  EXPECT_EQ(runs[0].key_end, 550);
  EXPECT_TRUE(runs[1].causal);
  EXPECT_EQ(runs[1].rows, 100);
}

TEST(Mask, InterleavedSequencesAreMasked) {
  Mask mask(80, 256, [](auto i, auto j) { return j <= i && j % 2 == i % 2; });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_FALSE(runs[0].causal);
}

TEST(Mask, RemovedRangeIsMasked) {
  Mask mask(64, 512, [](auto i, auto j) { return j <= 300 + i && (j < 100 || j >= 150); });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_FALSE(runs[0].causal);
}

TEST(Mask, SlidingWindowIsMasked) {
  Mask mask(128, 512, [](auto i, auto j) { return j <= 200 + i && j > 200 + i - 50; });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_FALSE(runs[0].causal);
}

TEST(Mask, BidirectionalIsMasked) {
  Mask mask(64, 512, [](auto, auto j) { return j < 64; });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_FALSE(runs[0].causal);
  EXPECT_EQ(runs[0].key_end, 64);
}

TEST(Mask, RowsThatSeeNothing) {
  Mask mask(80, 256, [](auto i, auto j) { return i < 64 && j <= i; });
  const auto runs = read_checked(mask);
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_TRUE(runs[0].causal);
  EXPECT_FALSE(runs[1].causal);
  EXPECT_EQ(runs[1].key_begin, runs[1].key_end);
  Mask nothing(64, 256, [](auto, auto) { return false; });
  EXPECT_EQ(read_checked(nothing).size(), 1U);
}

TEST(Mask, RandomMixtures) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const std::int64_t rows = 64 + static_cast<std::int64_t>(random() % 100);
    const std::int64_t keys = 64 * (1 + static_cast<std::int64_t>(random() % 8)) + random() % 3;
    std::vector<int> owner(keys);
    std::vector<int> position(keys);
    const int sequences = 1 + static_cast<int>(random() % 3);
    std::vector<int> next(sequences, 0);
    int current = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (random() % 50 == 0) current = static_cast<int>(random() % sequences);
      owner[j] = random() % 200 == 0 ? -1 : current;
      position[j] = next[current]++;
    }
    std::vector<int> row_owner(rows);
    std::vector<int> row_position(rows);
    for (std::int64_t i = 0; i < rows; ++i) {
      row_owner[i] =
          random() % 20 == 0 || i == 0 ? static_cast<int>(random() % sequences) : row_owner[i - 1];
      row_position[i] = static_cast<int>(i + random() % 2);
    }
    Mask mask(
        rows, keys,
        [&](auto i, auto j) { return owner[j] == row_owner[i] && position[j] <= row_position[i]; },
        static_cast<std::int64_t>(random() % 5));
    read_checked(mask, 1 + round % 3);
  }
}

TEST(Mask, LongRowsCountRight) {
  // Counters of 16 bits must not wrap: a row longer than 65536 keys.
  Mask mask(64, 140000, [](auto i, auto j) { return j <= 139000 + i; });
  const auto runs = read_mask(mask.view(), 2);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_TRUE(runs[0].causal);
  mask.at(5, 70000) = kHidden;
  EXPECT_FALSE(read_mask(mask.view(), 2)[0].causal && read_mask(mask.view(), 2).size() == 1);
}

TEST(Mask, OtherValuesAreRefusedByPlace) {
  Mask mask(64, 256, [](auto i, auto j) { return j <= i; });
  for (const std::uint16_t value : {kOne, std::uint16_t{0x7E00}, std::uint16_t{0x7C00},
                                    std::uint16_t{0x0001}, std::uint16_t{0xFBFF}}) {
    Mask strange = mask;
    strange.at(12, 34) = value;
    try {
      read_mask(strange.view(), 2);
      FAIL() << "accepted " << value;
    } catch (const Unsupported& e) {
      EXPECT_NE(std::string(e.what()).find("row 12, key 34"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace minference::llama_host
