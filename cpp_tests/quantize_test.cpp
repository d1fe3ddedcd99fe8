// Kernels of quantised numbers against an oracle in double precision: nearest codes, sums, and what is no number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "quantize_kernels.h"

namespace {

using oases::kQuantizedBlock;

constexpr int64_t kSizes[] = {1, 5, 127, 128, 129, 1000};
constexpr double kLargestCode = 127;

std::vector<float> normal(int64_t count, int seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> draw;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = scale * draw(generator);
  return numbers;
}

std::vector<uint8_t> packed_sum(const std::vector<float>& x, const std::vector<uint8_t>& parts = {},
                                int64_t count = 0, int64_t skip = -1) {
  const int64_t n = static_cast<int64_t>(x.size()), stride = oases::packed_bytes(n);
  std::vector<uint8_t> packed(stride);
  oases::cpu::quantize_sum(x.data(), parts.data(), count, skip, stride, n, packed.data());
  return packed;
}

std::vector<float> decoded(const std::vector<uint8_t>& packed, int64_t n) {
  std::vector<float> out(n + 1, 77.0f);
  oases::cpu::dequantize(packed.data(), n, out.data());
  EXPECT_EQ(out.back(), 77.0f) << "wrote past its end";
  out.pop_back();
  return out;
}

double largest_in_block(const std::vector<float>& x, size_t i) {
  const size_t first = i / kQuantizedBlock * kQuantizedBlock,
               end = std::min<size_t>(first + kQuantizedBlock, x.size());
  double most = 0;
  for (size_t j = first; j < end; ++j) most = std::max(most, std::abs(static_cast<double>(x[j])));
  return most;
}

// Distance from y to the code nearest to it.
double nearest(double y) { return std::abs(y - std::clamp(std::round(y), -kLargestCode, kLargestCode)); }

// Scale of the block that holds number i of n.
double scale_at(const std::vector<uint8_t>& packed, size_t n, size_t i) {
  float scale;
  std::memcpy(
      &scale,
      packed.data() + oases::quantized_blocks(n) * kQuantizedBlock + i / kQuantizedBlock * sizeof scale,
      sizeof scale);
  return scale;
}

constexpr double kLeast = 0x1p-149;  // number of fp32 above 0
constexpr float kMost = std::numeric_limits<float>::max();

// Down to blocks of a few least numbers, and up to the largest.
constexpr float kSizesOfNumbers[] = {1.0f, 1e-30f, 1e30f, 7e37f, 1e-37f, 1e-39f, 1e-41f, 1e-43f, 5e-45f};

TEST(Quantize, CodesAreTheNearest) {
  for (const int64_t n : kSizes)
    for (const float size : kSizesOfNumbers) {
      const std::vector<float> x = normal(n, static_cast<int>(n), size);
      const std::vector<uint8_t> packed = packed_sum(x);
      const std::vector<float> y = decoded(packed, n);
      for (int64_t i = 0; i < n; ++i) {
        const double scale = scale_at(packed, n, i), unit = largest_in_block(x, i) / kLargestCode;
        EXPECT_GE(scale, unit * (1 - 1e-6));
        EXPECT_LE(scale, unit * (1 + 1e-6) + kLeast);
        if (scale == 0) {
          EXPECT_EQ(y[i], x[i]);
          continue;
        }
        // fp32 rounds the quotient and the product: ties may go either way.
        EXPECT_LE(std::abs(static_cast<double>(x[i]) - y[i]),
                  scale * (nearest(x[i] / scale) + 1e-5 * kLargestCode) + kLeast / 2)
            << n << ' ' << i << ' ' << size;
      }
    }
}

TEST(Quantize, ZerosAndOneOutlier) {
  EXPECT_EQ(decoded(packed_sum(std::vector<float>(200, 0.0f)), 200), std::vector<float>(200, 0.0f));
  std::vector<float> outlier = normal(256, 2);
  outlier[7] = 3e38f;
  const std::vector<float> z = decoded(packed_sum(outlier), 256);
  EXPECT_NEAR(z[7] / 3e38f, 1.0f, 1e-5f);
  for (int64_t i = 0; i < 128; ++i) EXPECT_TRUE(std::isfinite(z[i]));
  for (int64_t i = 128; i < 256; ++i)
    EXPECT_LE(std::abs(z[i] - outlier[i]), largest_in_block(outlier, i) / kLargestCode);
}

TEST(Quantize, FiniteBlocksStayFinite) {
  for (int seed = 0; seed < 20; ++seed) {
    std::vector<float> one(128, 0.0f), all(128, kMost), some = normal(128, seed, 1e38f);
    one[seed] = -kMost;
    for (float& number : some) number = std::isfinite(number) ? number : kMost;
    for (int i = 0; i < seed; ++i) all[5 * i] = -kMost;
    for (const auto& x : {one, all, some}) {
      const std::vector<float> y = decoded(packed_sum(x), 128);
      for (int i = 0; i < 128; ++i) {
        EXPECT_TRUE(std::isfinite(y[i])) << i;
        if (std::abs(x[i]) == kMost) {
          EXPECT_NEAR(y[i] / x[i], 1.0f, 1e-6f);
        }
      }
    }
  }
}

TEST(Quantize, NaNAndInfinityAreSeenInTheirBlockAlone) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF, -HUGE_VALF}) {
    std::vector<float> x = normal(300, 3);
    x[140] = bad;
    const std::vector<uint8_t> packed = packed_sum(x);
    const std::vector<float> y = decoded(packed, 300);
    const std::vector<float> sum = decoded(packed_sum(std::vector<float>(300, 1.0f), packed, 1), 300);
    for (size_t i = 0; i < 300; ++i) {
      EXPECT_EQ(std::isnan(y[i]), i / 128 == 1) << i;
      EXPECT_EQ(std::isnan(sum[i]), i / 128 == 1) << i;
    }
  }
}

TEST(Quantize, SumsSkipOneOwnPartAndAddTheRest) {
  for (const int64_t n : kSizes) {
    const std::vector<float> x = normal(n, 4);
    std::vector<uint8_t> parts;
    std::vector<float> expected = x;
    for (int part = 0; part < 3; ++part) {
      const std::vector<uint8_t> packed = packed_sum(normal(n, 5 + part));
      parts.insert(parts.end(), packed.begin(), packed.end());
      const std::vector<float> numbers = decoded(packed, n);
      if (part != 1)
        for (int64_t i = 0; i < n; ++i) expected[i] += numbers[i];
    }
    std::vector<float> sum(n);
    oases::cpu::sum_parts(x.data(), parts.data(), 3, 1, oases::packed_bytes(n), n, sum.data());
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(sum[i], expected[i], 1e-5f);
    EXPECT_EQ(packed_sum(x, parts, 3, 1), packed_sum(sum));
  }
}

}  // namespace
