// Kernels of quantised numbers against an oracle in double precision: nearest codes, sums, NaN, rounding at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "quantize_kernels.h"

namespace {

using oases::Code;
using oases::kQuantizedBlock;
using oases::Quantization;

constexpr Code kCodes[] = {Code::int8, Code::fp8, Code::int4};
constexpr int64_t kSizes[] = {1, 5, 127, 128, 129, 1000};

// Numbers that a code stands for, in ascending order, over its scale.
std::vector<double> numbers_of(Code code) {
  std::vector<double> found;
  if (code == Code::fp8) {
    for (int bits = 0; bits < 127; ++bits) {
      const int exponent = bits >> 3, mantissa = bits & 7;
      const double number =
          exponent ? std::ldexp(1 + mantissa / 8.0, exponent - 7) : std::ldexp(mantissa / 8.0, -6);
      found.push_back(number);
      if (number > 0) found.push_back(-number);
    }
  } else {
    const int most = code == Code::int8 ? 127 : 7;
    for (int number = -most; number <= most; ++number) found.push_back(number);
  }
  std::sort(found.begin(), found.end());
  return found;
}

double largest_of(Code code) { return numbers_of(code).back(); }

std::vector<float> normal(int64_t count, int seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> draw;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = scale * draw(generator);
  return numbers;
}

std::vector<uint8_t> packed_sum(const Quantization& how, const std::vector<float>& x,
                                const std::vector<uint8_t>& parts = {}, int64_t count = 0,
                                int64_t skip = -1) {
  const int64_t n = static_cast<int64_t>(x.size()), stride = oases::packed_bytes(how.code, n);
  std::vector<uint8_t> packed(stride);
  oases::cpu::quantize_sum(how, x.data(), parts.data(), count, skip, stride, n, 0, packed.data());
  return packed;
}

std::vector<float> decoded(const Quantization& how, const std::vector<uint8_t>& packed, int64_t n) {
  std::vector<float> out(n + 1, 77.0f);
  oases::cpu::dequantize(how, packed.data(), n, out.data());
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

// Distance from y to the number nearest to it.
double nearest(const std::vector<double>& numbers, double y) {
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), y);
  double least = above == numbers.end() ? HUGE_VAL : *above - y;
  if (above != numbers.begin()) least = std::min(least, y - *(above - 1));
  return least;
}

// Scale of the block that holds number i of n.
double scale_at(Code code, const std::vector<uint8_t>& packed, size_t n, size_t i) {
  float scale;
  std::memcpy(&scale,
              packed.data() + oases::quantized_blocks(n) * oases::bytes_of_codes(code) +
                  i / kQuantizedBlock * sizeof scale,
              sizeof scale);
  return scale;
}

constexpr double kLeast = 0x1p-149;  // number of fp32 above 0
constexpr float kMost = std::numeric_limits<float>::max();

// Down to blocks of a few least numbers, and up to the largest.
constexpr float kSizesOfNumbers[] = {1.0f, 1e-30f, 1e30f, 7e37f, 1e-37f, 1e-39f, 1e-41f, 1e-43f, 5e-45f};

TEST(Quantize, CodesAreTheNearest) {
  for (const Code code : kCodes) {
    const std::vector<double> numbers = numbers_of(code);
    for (const int64_t n : kSizes)
      for (const float size : kSizesOfNumbers) {
        const std::vector<float> x = normal(n, static_cast<int>(n), size);
        const std::vector<uint8_t> packed = packed_sum({code}, x);
        const std::vector<float> y = decoded({code}, packed, n);
        for (int64_t i = 0; i < n; ++i) {
          const double scale = scale_at(code, packed, n, i), unit = largest_in_block(x, i) / largest_of(code);
          EXPECT_GE(scale, unit * (1 - 1e-6));
          EXPECT_LE(scale, unit * (1 + 1e-6) + kLeast);
          if (scale == 0) {
            EXPECT_EQ(y[i], x[i]);
            continue;
          }
          // fp32 rounds the quotient and the product: ties may go either way.
          EXPECT_LE(std::abs(static_cast<double>(x[i]) - y[i]),
                    scale * (nearest(numbers, x[i] / scale) + 1e-5 * largest_of(code)) + kLeast / 2)
              << static_cast<int>(code) << ' ' << n << ' ' << i << ' ' << size;
        }
      }
  }
}

TEST(Quantize, ZerosAndOneOutlier) {
  for (const Code code : kCodes)
    for (const bool rotated : {false, true}) {
      const Quantization how{code, false, rotated};
      EXPECT_EQ(decoded(how, packed_sum(how, std::vector<float>(200, 0.0f)), 200),
                std::vector<float>(200, 0.0f));
    }
  for (const Code code : kCodes) {
    const double step = code == Code::int8 ? 1.0 / 127 : code == Code::fp8 ? 32.0 / 448 : 1.0 / 7;
    std::vector<float> outlier = normal(256, 2);
    outlier[7] = 3e38f;
    const std::vector<float> z = decoded({code}, packed_sum({code}, outlier), 256);
    EXPECT_NEAR(z[7] / 3e38f, 1.0f, 1e-5f);
    for (int64_t i = 0; i < 128; ++i) EXPECT_TRUE(std::isfinite(z[i]));
    for (int64_t i = 128; i < 256; ++i)
      EXPECT_LE(std::abs(z[i] - outlier[i]), largest_in_block(outlier, i) * step);
  }
}

// The errors of a rotated block, squared and summed, are those of its codes times the matrix.
TEST(Quantize, ErrorsOfRotatedBlocksAreThoseOfTheirScales) {
  for (const Code code : kCodes)
    for (const bool stochastic : {false, true})
      for (const float size : kSizesOfNumbers) {
        const Quantization how{code, stochastic, true, 5};
        const std::vector<float> x = normal(kQuantizedBlock, 12, size);
        const std::vector<uint8_t> packed = packed_sum(how, x);
        const std::vector<float> y = decoded(how, packed, kQuantizedBlock);
        double error = 0, norm = 0;
        for (int64_t i = 0; i < kQuantizedBlock; ++i)
          error += std::pow(static_cast<double>(x[i]) - y[i], 2), norm += std::pow<double>(x[i], 2);
        const double scale = scale_at(code, packed, kQuantizedBlock, 0),
                     widest = (code == Code::fp8 ? 32 : 1) * (stochastic ? 1 : 0.5);
        EXPECT_LE(scale, std::sqrt(128 * norm) / 32 / largest_of(code) * (1 + 1e-5) + kLeast);
        EXPECT_LE(std::sqrt(error), 32 * widest * scale * (1 + 1e-5) + std::sqrt(128.0) * kLeast / 2)
            << static_cast<int>(code) << ' ' << size;
      }
}

TEST(Quantize, FiniteBlocksStayFinite) {
  for (const Code code : kCodes)
    for (const bool stochastic : {false, true})
      for (const bool rotated : {false, true})
        for (int seed = 0; seed < 20; ++seed) {
          const Quantization how{code, stochastic, rotated, static_cast<uint64_t>(seed + 1)};
          std::vector<float> one(128, 0.0f), all(128, kMost), some = normal(128, seed, 1e38f);
          one[seed] = -kMost;
          for (float& number : some) number = std::isfinite(number) ? number : kMost;
          for (int i = 0; i < seed; ++i) all[5 * i] = -kMost;
          for (const auto& x : {one, all, some}) {
            const std::vector<float> y = decoded(how, packed_sum(how, x), 128);
            for (int i = 0; i < 128; ++i) {
              EXPECT_TRUE(std::isfinite(y[i])) << i;
              if (!rotated && std::abs(x[i]) == kMost) {
                EXPECT_NEAR(y[i] / x[i], 1.0f, 1e-6f);
              }
            }
          }
        }
}

TEST(Quantize, AWiresNameSaysHow) {
  const Quantization found = oases::quantization_called("int4:rotated:stochastic");
  EXPECT_TRUE(found.code == Code::int4 && found.rotated && found.stochastic);
  const Quantization plain = oases::quantization_called("fp8");
  EXPECT_TRUE(plain.code == Code::fp8 && !plain.rotated && !plain.stochastic);
  EXPECT_TRUE(oases::quantization_called("int8:rotated").rotated);
  EXPECT_TRUE(oases::quantization_called("int8:stochastic").stochastic);
  EXPECT_TRUE(oases::quantization_called("bf16").code == Code::bf16);
  for (const char* wrong : {"", "int7", "int8:", "int8:stochastic:rotated", "fp16"})
    EXPECT_THROW(oases::quantization_called(wrong), std::out_of_range) << wrong;
}

TEST(Quantize, NaNAndInfinityAreSeenInTheirBlockAlone) {
  for (const Code code : kCodes)
    for (const bool rotated : {false, true})
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF, -HUGE_VALF}) {
        std::vector<float> x = normal(300, 3);
        x[140] = bad;
        const Quantization how{code, false, rotated};
        const std::vector<uint8_t> packed = packed_sum(how, x);
        const std::vector<float> y = decoded(how, packed, 300);
        const std::vector<float> sum =
            decoded(how, packed_sum(how, std::vector<float>(300, 1.0f), packed, 1), 300);
        for (size_t i = 0; i < 300; ++i) {
          EXPECT_EQ(std::isnan(y[i]), i / 128 == 1) << i;
          EXPECT_EQ(std::isnan(sum[i]), i / 128 == 1) << i;
        }
      }
}

TEST(Quantize, Bf16RoundsToNearestEvenAndKeepsWhatIsNoNumber) {
  const float step = 0x1p-7f;  // of numbers from 1 to 2
  std::vector<float> x(130, 1.0f);
  x[0] = 1 + step / 2, x[1] = 1 + 3 * step / 2, x[2] = -1 - 0.6f * step, x[3] = 1e-41f, x[4] = -0.0f;
  x[5] = HUGE_VALF, x[6] = std::numeric_limits<float>::quiet_NaN(), x[129] = 3.39e38f;
  const std::vector<uint8_t> packed = packed_sum({Code::bf16}, x);
  EXPECT_EQ(packed.size(), 2 * (256 + 4));
  const std::vector<float> y = decoded({Code::bf16}, packed, 130);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], 1 + 2 * step);
  EXPECT_EQ(y[2], -1 - step);
  EXPECT_NEAR(y[3], 1e-41f, 0x1p-134f);
  EXPECT_TRUE(y[4] == 0 && std::signbit(y[4]));
  EXPECT_EQ(y[5], HUGE_VALF);
  EXPECT_TRUE(std::isnan(y[6]));
  EXPECT_NEAR(y[129] / 3.39e38f, 1.0f, 0x1p-8f);
  for (int64_t i = 7; i < 129; ++i) EXPECT_EQ(y[i], 1.0f);
  const std::vector<float> sum =
      decoded({Code::bf16}, packed_sum({Code::bf16}, std::vector<float>(130, 2.0f), packed, 1), 130);
  EXPECT_EQ(sum[7], 3.0f);
  EXPECT_TRUE(std::isnan(sum[6]));
}

TEST(Quantize, SumsSkipOneOwnPartAndAddTheRest) {
  for (const Quantization& how :
       {Quantization{Code::int8}, Quantization{Code::fp8}, Quantization{Code::int4},
        Quantization{Code::int8, false, true}, Quantization{Code::int4, false, true}})
    for (const int64_t n : kSizes) {
      const std::vector<float> x = normal(n, 4);
      std::vector<uint8_t> parts;
      std::vector<float> expected = x;
      for (int part = 0; part < 3; ++part) {
        const std::vector<uint8_t> packed = packed_sum(how, normal(n, 5 + part));
        parts.insert(parts.end(), packed.begin(), packed.end());
        const std::vector<float> numbers = decoded(how, packed, n);
        if (part != 1)
          for (int64_t i = 0; i < n; ++i) expected[i] += numbers[i];
      }
      std::vector<float> sum(n);
      oases::cpu::sum_parts(how, x.data(), parts.data(), 3, 1, oases::packed_bytes(how.code, n), n,
                            sum.data());
      for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(sum[i], expected[i], 1e-5f);
      EXPECT_EQ(packed_sum(how, x, parts, 3, 1), packed_sum(how, sum));
    }
}

TEST(Quantize, RotationIsUndoneByDecoding) {
  for (const Code code : kCodes) {
    const Quantization how{code, false, true};
    const std::vector<float> x = normal(256, 9);
    const std::vector<float> y = decoded(how, packed_sum(how, x), 256);
    double error = 0, norm = 0;
    for (size_t i = 0; i < 256; ++i) error += std::pow(x[i] - y[i], 2), norm += x[i] * x[i];
    EXPECT_LE(std::sqrt(error / norm), code == Code::int8 ? 0.01 : code == Code::fp8 ? 0.04 : 0.2);
  }
}

// The mean over 1,000 seeds of a number rounded up or down at random is the number: within five standard errors.
TEST(Quantize, RoundingAtRandomIsUnbiased) {
  constexpr int64_t n = 128;
  constexpr int kSeeds = 1000;
  for (const Code code : kCodes) {
    const std::vector<float> x = normal(n, 10);
    std::vector<double> mean(n);
    for (int seed = 0; seed < kSeeds; ++seed) {
      const Quantization how{code, true, false, seed * 0x9E3779B97F4A7C15u};
      const std::vector<float> y = decoded(how, packed_sum(how, x), n);
      for (int64_t i = 0; i < n; ++i) mean[i] += y[i] / kSeeds;
    }
    for (int64_t i = 0; i < n; ++i) {
      const double widest = largest_in_block(x, i) / largest_of(code) * (code == Code::fp8 ? 32 : 1);
      EXPECT_NEAR(mean[i], x[i], 5 * 0.5 * widest / std::sqrt(kSeeds)) << static_cast<int>(code) << ' ' << i;
    }
  }
}

}  // namespace
