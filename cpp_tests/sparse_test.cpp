// Kernels of sparse gradients against plain loops: medians, NaN in them, sketches, bitmaps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "bitmap_kernels.h"
#include "hashing.h"
#include "medians.h"
#include "sketch_kernels.h"

namespace {

using oases::SketchShape;

std::vector<float> normal(int64_t count, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> draw;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = draw(generator);
  return numbers;
}

template <int count>
void expect_medians() {
  for (int seed = 0; seed < 200; ++seed) {
    std::vector<float> numbers = normal(count, seed);
    const float found = oases::median_of<count>(numbers.data());
    for (int bad = 0; bad < count; ++bad) {
      std::vector<float> with_nan = numbers;
      with_nan[bad] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(oases::median_of<count>(with_nan.data()))) << count << ' ' << bad;
    }
    std::sort(numbers.begin(), numbers.end());
    EXPECT_EQ(found, numbers[count / 2]);
  }
}

TEST(Sparse, MediansAreThoseOfASort) {
  expect_medians<1>();
  expect_medians<3>();
  expect_medians<5>();
  const float infinite[] = {HUGE_VALF, -HUGE_VALF, 2.0f};
  EXPECT_EQ(oases::median_of<3>(infinite), 2.0f);
}

// Widths around the vector width and the block width of rows.
class SparseWidths : public ::testing::TestWithParam<int64_t> {};

TEST_P(SparseWidths, SketchesAreThoseOfPlainLoops) {
  const int64_t n = GetParam(), m = 50;
  const SketchShape shape{3, 7, n, 11};
  std::vector<int64_t> keys(m);
  for (int64_t i = 0; i < m; ++i) keys[i] = i * i;
  const std::vector<float> values = normal(m * n, 1);
  std::vector<float> table(3 * 7 * n), plain(3 * 7 * n), found(m * n);
  oases::cpu::sketch_encode(keys.data(), values.data(), m, shape, true, nullptr, nullptr, table.data());
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t i = 0; i < m; ++i) {
      const uint64_t hash = oases::hash_of(keys[i], row, 11);
      const int64_t cell = row * 7 + oases::column_of(hash, 7);
      for (int64_t c = 0; c < n; ++c) plain[cell * n + c] += oases::sign_of(hash) * values[i * n + c];
    }
  }
  EXPECT_EQ(table, plain);
  oases::cpu::sketch_decode(table.data(), keys.data(), m, shape, found.data());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t c = 0; c < n; ++c) {
      float each[3];
      for (int64_t row = 0; row < 3; ++row) {
        const uint64_t hash = oases::hash_of(keys[i], row, 11);
        each[row] = oases::sign_of(hash) * plain[(row * 7 + oases::column_of(hash, 7)) * n + c];
      }
      std::sort(each, each + 3);
      EXPECT_EQ(found[i * n + c], each[1]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SparseWidths, ::testing::Values(1, 3, 8, 127, 128, 129, 300));

TEST(Sparse, BitmapsMarkTheRowsThatAreUsed) {
  constexpr int64_t rows = 20001, n = 5;
  std::vector<float> x(rows * n, -0.0f);
  std::vector<int64_t> used;
  for (int64_t row = 3; row < rows; row += 77) {
    x[row * n + row % n] = row % 2 ? 1e-45f : std::numeric_limits<float>::quiet_NaN();
    used.push_back(row);
  }
  std::vector<uint8_t> bits(oases::bitmap_bytes(rows));
  std::vector<int64_t> counts(oases::bitmap_tiles(rows)), ends(counts.size()), found(used.size());
  oases::cpu::bitmap_pack(x.data(), oases::DType::f32, rows, n, bits.data());
  oases::cpu::bitmap_count(bits.data(), rows, counts.data());
  for (size_t tile = 0; tile < counts.size(); ++tile) {
    ends[tile] = counts[tile] + (tile > 0 ? ends[tile - 1] : 0);
  }
  ASSERT_EQ(ends.back(), static_cast<int64_t>(used.size()));
  oases::cpu::bitmap_list(bits.data(), rows, counts.data(), ends.data(), found.data());
  EXPECT_EQ(found, used);
}

}  // namespace
