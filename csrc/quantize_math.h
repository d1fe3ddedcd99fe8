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
// scales have no reciprocal in fp32.
constexpr float kTiny = 0x1p-100f, kLift = 0x1p+64f;
constexpr float kLargestCode = 127.0f;
constexpr uint32_t kInfinite = 0x7F800000u, kNan = 0x7FC00000u;

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

OASES_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }

// A product that is rounded before it is added to: nvcc would make one operation of both.
OASES_INLINE float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// What a block is multiplied by before it is coded. largest: of its numbers' sizes.
OASES_INLINE float lift_of(float largest) { return largest < kTiny ? kLift : 1.0f; }

// The scale of a block whose largest number is `largest` * `unit` / 127. Rounded up, also where it is a denormal, so
// that no code is beyond the limit, but for the largest numbers of fp32, which must not decode to an infinity.
OASES_INLINE float scale_of(float largest, float unit) {
  float scale = largest / kLargestCode * unit;
  if (scale / unit * kLargestCode < largest) scale = float_of(bits_of(scale) + 1);
  return bits_of(scale * kLargestCode) == kInfinite ? float_of(bits_of(scale) - 1) : scale;
}

// The factor that makes codes of a block's numbers. By the scale as it is stored: a denormal one is rounded.
OASES_INLINE float to_codes(float largest, float scale, float lift) {
  return largest == 0.0f ? 0.0f : 1.0f / (scale * lift);
}

// The code nearest to x.
OASES_INLINE int32_t code_of(float x, float up) {
  constexpr int32_t limit = static_cast<int32_t>(kLargestCode);
  const int32_t q = static_cast<int32_t>(bits_of(times(x, up) + kToInteger)) - 0x4B400000;
  return q < -limit ? -limit : q > limit ? limit : q;
}

OASES_INLINE float number_of(uint8_t code, float scale) {
  return times(static_cast<float>(static_cast<int8_t>(code)), scale);
}

}  // namespace oases::codes
