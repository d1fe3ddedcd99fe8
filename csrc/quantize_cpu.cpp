#include "quantize_kernels.h"

#include <algorithm>
#include <cstring>

#include "quantize_math.h"

// One body for every instruction set: the compiler vectorises the loops for each, the loader picks at run time. None
// makes one operation of a product and a sum, so that all round alike. ThreadSanitizer's calls in what picks, which the
// loader runs before it has found them, end the program.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define OASES_FOR_EACH_ISA                                                     \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), \
                 optimize("O3", "fp-contract=off")))
#else
#define OASES_FOR_EACH_ISA
#endif

namespace oases::codes {

// Copies n <= 128 numbers and zeros behind them.
OASES_INLINE void load(const float* x, int64_t n, float* block) {
  if (n == kN) {
    std::memcpy(block, x, kN * sizeof(float));
    return;
  }
  std::memcpy(block, x, n * sizeof(float));
  std::memset(block + n, 0, (kN - n) * sizeof(float));
}

// The largest size of a number in a block, as bits: of an infinity or a NaN at least 0x7F800000.
OASES_INLINE uint32_t largest_bits(const float* block) {
  uint32_t most = 0;
  for (int i = 0; i < kN; ++i) most = std::max(most, bits_of(block[i]) & 0x7FFFFFFFu);
  return most;
}

OASES_INLINE void encode(float* block, uint8_t* codes, float* scale) {
  const uint32_t most = largest_bits(block);
  if (most >= kInfinite) {
    *scale = float_of(kNan);
    std::memset(codes, 0, kN);
    return;
  }
  float largest = float_of(most);
  const float lift = lift_of(largest);
  if (lift != 1.0f)
    for (int i = 0; i < kN; ++i) block[i] *= lift;
  largest *= lift;
  *scale = scale_of(largest, 1.0f / lift);
  const float up = to_codes(largest, *scale, lift);
  int32_t whole[kN];
  for (int i = 0; i < kN; ++i) whole[i] = code_of(block[i], up);
  for (int i = 0; i < kN; ++i) codes[i] = static_cast<uint8_t>(whole[i]);
}

OASES_INLINE void decode(const uint8_t* codes, float scale, float* block) {
  for (int i = 0; i < kN; ++i) block[i] = number_of(codes[i], scale);
}

struct Packed {
  const uint8_t* codes;
  const uint8_t* scales;  // of floats, perhaps unaligned
  float scale(int64_t block) const {
    float found;
    std::memcpy(&found, scales + block * sizeof(float), sizeof found);
    return found;
  }
};

OASES_INLINE Packed packed_at(const uint8_t* packed, int64_t n) {
  return {packed, packed + quantized_blocks(n) * kN};
}

// x's block and those of the parts.
OASES_INLINE void sum_of_block(const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                               int64_t stride, int64_t n, int64_t b, float* block) {
  alignas(64) float other[kN];
  load(x + b * kN, std::min<int64_t>(kN, n - b * kN), block);
  for (int64_t part = 0; part < count; ++part) {
    if (part == skip) continue;
    const Packed from = packed_at(parts + part * stride, n);
    decode(from.codes + b * kN, from.scale(b), other);
    for (int i = 0; i < kN; ++i) block[i] += other[i];
  }
}

}  // namespace oases::codes

namespace oases::cpu {

using namespace codes;

OASES_FOR_EACH_ISA void quantize_sum(const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                                     int64_t stride, int64_t n, uint8_t* packed) {
  const int64_t blocks = quantized_blocks(n);
  uint8_t* const scales = packed + blocks * kN;
  alignas(64) float block[kN];
  for (int64_t b = 0; b < blocks; ++b) {
    sum_of_block(x, parts, count, skip, stride, n, b, block);
    float scale;
    encode(block, packed + b * kN, &scale);
    std::memcpy(scales + b * sizeof(float), &scale, sizeof scale);
  }
}

OASES_FOR_EACH_ISA void sum_parts(const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                                  int64_t stride, int64_t n, float* out) {
  alignas(64) float block[kN];
  for (int64_t b = 0; b < quantized_blocks(n); ++b) {
    sum_of_block(x, parts, count, skip, stride, n, b, block);
    std::memcpy(out + b * kN, block, std::min<int64_t>(kN, n - b * kN) * sizeof(float));
  }
}

OASES_FOR_EACH_ISA void dequantize(const uint8_t* packed, int64_t n, float* out) {
  const Packed from = packed_at(packed, n);
  alignas(64) float block[kN];
  for (int64_t b = 0; b < quantized_blocks(n); ++b) {
    const int64_t here = std::min<int64_t>(kN, n - b * kN);
    if (here == kN) {
      decode(from.codes + b * kN, from.scale(b), out + b * kN);
      continue;
    }
    decode(from.codes + b * kN, from.scale(b), block);
    std::memcpy(out + b * kN, block, here * sizeof(float));
  }
}

}  // namespace oases::cpu
