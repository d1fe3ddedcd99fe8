// Numbers of quantised blocks, one at a time, on the CPU and in CUDA: equal to the bit, so that all ranks of a group
// decode the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantize_kernels.h"

// Inlined into clones for every instruction set, which `inline` alone would not be.
#ifdef __CUDACC__
#define OASES_INLINE __host__ __device__ __forceinline__
#else
#define OASES_INLINE inline __attribute__((always_inline))
#endif

namespace oases::codes {

constexpr int kN = static_cast<int>(kQuantizedBlock);
// 1.5 * 2^23: a sum with it is rounded to a whole number, to nearest even.
constexpr float kToInteger = 12582912.0f;
// Blocks whose largest number is below the first are multiplied by the second before they are coded, since small
// scales have no reciprocal in fp32; rotated ones above the third by the fourth, since a sum of 128 numbers may be
// infinite.
constexpr float kTiny = 0x1p-100f, kLift = 0x1p+64f, kHuge = 0x1p+100f, kDrop = 0x1p-10f;
// Of a rotated block, the Hadamard matrix's 128 is divided by in two parts, so that neither the scale is infinite for
// large numbers nor much coarser than the numbers for denormal ones: before coding, and after decoding.
constexpr float kBefore = 32.0f, kAfter = 4.0f;
static_assert(kBefore * kAfter == kN);
constexpr float kMost = 3.402823466e+38f;  // the largest number of fp32
constexpr uint32_t kInfinite = 0x7F800000u, kNan = 0x7FC00000u;

OASES_INLINE constexpr float largest_code(Code code) {
  return code == Code::int8 ? 127.0f : code == Code::fp8 ? 448.0f : 7.0f;
}

OASES_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
OASES_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

OASES_INLINE float smaller(float a, float b) { return b < a ? b : a; }
OASES_INLINE float larger(float a, float b) { return a < b ? b : a; }
OASES_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
OASES_INLINE float within(float x, float limit) { return smaller(larger(x, -limit), limit); }

// A product that is rounded before it is added to: nvcc would make one operation of both.
OASES_INLINE float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// A hash of the number's index, uniform in (-0.5, 0.5), with the mean 0.
OASES_INLINE float noise(uint32_t index, uint32_t seed) {
  uint32_t h = index * 0x9E3779B1u + seed;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  h ^= h >> 16;
  return static_cast<float>(static_cast<int32_t>(h >> 9)) * 0x1p-23f - (0.5f - 0x1p-24f);
}

// Of a seed of 64 bits, what `noise` takes.
OASES_INLINE uint32_t folded(uint64_t seed) { return static_cast<uint32_t>(seed ^ (seed >> 32)); }

// Signs of the rotation: bit i % 32 of the pattern i / 32.
OASES_INLINE float sign_of(int i) {
  const uint32_t signs = i < 64 ? (i < 32 ? 0x9D2C5680u : 0x3C6EF372u) : (i < 96 ? 0xB5297A4Du : 0x68E31DA4u);
  return (signs >> (i & 31)) & 1u ? -1.0f : 1.0f;
}

// A number of a rotated block after the Hadamard matrix. One that rounding has moved past the largest is that.
OASES_INLINE float rotated_back(float x, int i, float scale) {
  return within(x * (sign_of(i) / kAfter) * scale, kMost);
}

// What a block is multiplied by before it is coded. largest: of its numbers' sizes.
OASES_INLINE float lift_of(float largest, bool rotated) {
  if (rotated && largest > kHuge) return kDrop;
  return largest < kTiny ? kLift : 1.0f;
}

// The scale of a block whose largest number is `largest` * `unit` / `limit`. Rounded up, also where it is a denormal, so
// that no code is beyond the limit, but for the largest numbers of fp32, which must not decode to an infinity.
OASES_INLINE float scale_of(float largest, float unit, float limit) {
  float scale = largest / limit * unit;
  if (scale / unit * limit < largest) scale = float_of(bits_of(scale) + 1);
  return bits_of(scale * limit) == kInfinite ? float_of(bits_of(scale) - 1) : scale;
}

// The factor that makes codes of a block's numbers. By the scale as it is stored: a denormal one is rounded.
OASES_INLINE float to_codes(float largest, float scale, float lift, float before) {
  return largest == 0.0f ? 0.0f : 1.0f / (scale * lift * before);
}

// A whole code within the limit. offset: of stochastic rounding, else 0.
OASES_INLINE int32_t to_whole(float x, float up, float offset, int32_t limit) {
  const int32_t q = static_cast<int32_t>(bits_of((times(x, up) + offset) + kToInteger)) - 0x4B400000;
  return q < -limit ? -limit : q > limit ? limit : q;
}

// A number of e4m3 nearest to y of at most 448, or next to it, with its sign.
OASES_INLINE uint8_t to_fp8(float y, float offset) {
  const uint32_t exponent = larger((bits_of(y) >> 23) & 255u, 121u);  // below 2^-6 the steps are 2^-9
  const float step = float_of((exponent - 3) << 23), per_step = float_of((257 - exponent) << 23);
  const float whole = ((times(y, per_step) + offset) + kToInteger) - kToInteger;
  const float value = whole * step;
  const uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
  const uint32_t normal = (bits >> 20) - (120u << 3);
  const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(float_of(bits) * 512.0f));
  const uint32_t below =
      0u - (bits < 0x3C800000u);  // a mask: a branch around the conversion is not vectorised
  return static_cast<uint8_t>((small & below) | (normal & ~below) | (bits_of(y) >> 24 & 0x80u));
}

OASES_INLINE float from_fp8(uint8_t code) {
  const int32_t size = code & 0x7F;
  const uint32_t normal = (static_cast<uint32_t>(size) << 20) + (120u << 23);
  const uint32_t small = bits_of(static_cast<float>(size) * 0x1p-9f);
  const uint32_t below = 0u - (size < 8);
  return float_of((small & below) | (normal & ~below) | (code & 0x80u) << 24);
}

// To bf16: `up` in [0, 1) of a step is added before the rest is dropped, or half of one, to nearest even. All NaN have
// one code: sums of NaN have other bits on the CPU than in CUDA.
OASES_INLINE uint16_t to_bf16(float x, bool stochastic, uint32_t index, uint32_t seed) {
  const uint32_t bits = bits_of(x);
  const uint32_t up = stochastic ? static_cast<uint32_t>((noise(index, seed) + 0.5f) * 65536.0f)
                                 : 0x7FFFu + ((bits >> 16) & 1u);
  const uint32_t size = bits & 0x7FFFFFFFu;
  const uint32_t rounded = size >= kInfinite ? bits : bits + up;
  return static_cast<uint16_t>((size > kInfinite ? kNan : rounded) >> 16);
}

OASES_INLINE float from_bf16(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }

}  // namespace oases::codes
