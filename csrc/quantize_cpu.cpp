#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "quantize_kernels.h"

// One body for every instruction set: the compiler vectorises the loops for each, the loader picks at run time.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OASES_FOR_EACH_ISA \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define OASES_FOR_EACH_ISA
#endif
#define OASES_INLINE inline __attribute__((always_inline))

namespace oases::cpu {
namespace codes {

constexpr int kN = static_cast<int>(kQuantizedBlock);
constexpr float kToInteger =
    12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, to nearest even
// Blocks whose largest number is below the first are multiplied by the second before they are coded, since small
// scales have no reciprocal in fp32; rotated ones above the third by the fourth, since a sum of 128 numbers may be
// infinite.
constexpr float kTiny = 0x1p-100f, kLift = 0x1p+64f, kHuge = 0x1p+100f, kDrop = 0x1p-10f;
// Of a rotated block, the Hadamard matrix's 128 is divided by in two parts, so that neither the scale is infinite for
// large numbers nor much coarser than the numbers for denormal ones: before coding, and after decoding.
constexpr float kBefore = 32.0f, kAfter = 4.0f;
static_assert(kBefore * kAfter == kN);

constexpr float largest_code(Code code) {
  return code == Code::int8 ? 127.0f : code == Code::fp8 ? 448.0f : 7.0f;
}

OASES_INLINE uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
OASES_INLINE float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// A hash of the number's index, uniform in (-0.5, 0.5), with the mean 0.
OASES_INLINE float noise(uint32_t index, uint32_t seed) {
  uint32_t h = index * 0x9E3779B1u + seed;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  h ^= h >> 16;
  return static_cast<float>(static_cast<int32_t>(h >> 9)) * 0x1p-23f - (0.5f - 0x1p-24f);
}

// Signs of the rotation: bit i of the pattern.
constexpr uint32_t kSigns[4] = {0x9D2C5680u, 0x3C6EF372u, 0xB5297A4Du, 0x68E31DA4u};

OASES_INLINE float sign_of(int i) { return (kSigns[i >> 5] >> (i & 31)) & 1u ? -1.0f : 1.0f; }

// Multiplies a block by the Hadamard matrix, which is its own inverse times 128.
OASES_INLINE void hadamard(float* x) {
  typedef float Row __attribute__((vector_size(64)));
  typedef int32_t Places __attribute__((vector_size(64)));
  constexpr int kRows = kN / 16;
  Row rows[kRows];
  std::memcpy(rows, x, sizeof rows);
  for (int half = 1; half < kRows; half *= 2)
    for (int row = 0; row < kRows; ++row)
      if (!(row & half)) {
        const Row low = rows[row], high = rows[row + half];
        rows[row] = low + high;
        rows[row + half] = low - high;
      }
  for (int half = 1; half < 16; half *= 2) {
    Places other;
    Row sign;
    for (int i = 0; i < 16; ++i) {
      other[i] = i ^ half;
      sign[i] = i & half ? -1.0f : 1.0f;
    }
    for (Row& row : rows) row = __builtin_shuffle(row, other) + row * sign;
  }
  std::memcpy(x, rows, sizeof rows);
}

// Copies n <= 128 numbers and zeros behind them.
OASES_INLINE void load(const float* x, int64_t n, float* block) {
  if (n == kN) {
    std::memcpy(block, x, kN * sizeof(float));
    return;
  }
  std::memcpy(block, x, n * sizeof(float));
  std::memset(block + n, 0, (kN - n) * sizeof(float));
}

OASES_INLINE void rotate(float* block) {
  for (int i = 0; i < kN; ++i) block[i] *= sign_of(i);
  hadamard(block);
}

// Undoes `rotate` on a block of codes. A number that rounding has moved past the largest of fp32 is that.
OASES_INLINE void rotate_back(float* block, float scale) {
  constexpr float kMost = std::numeric_limits<float>::max();
  hadamard(block);
  for (int i = 0; i < kN; ++i)
    block[i] = std::min(std::max(block[i] * (sign_of(i) / kAfter) * scale, -kMost), kMost);
}

// The largest size of a number in a block, as bits: of an infinity or a NaN at least 0x7F800000.
OASES_INLINE uint32_t largest_bits(const float* block) {
  uint32_t most = 0;
  for (int i = 0; i < kN; ++i) most = std::max(most, bits_of(block[i]) & 0x7FFFFFFFu);
  return most;
}

// The scale of a block whose largest number is `largest` * `unit` / `limit`. Rounded up, also where it is a denormal, so
// that no code is beyond the limit, but for the largest numbers of fp32, which must not decode to an infinity.
OASES_INLINE float scale_of(float largest, float unit, float limit) {
  float scale = largest / limit * unit;
  if (scale / unit * limit < largest) scale = float_of(bits_of(scale) + 1);
  return std::isinf(scale * limit) ? float_of(bits_of(scale) - 1) : scale;
}

// A number of e4m3 nearest to |y| <= 448, or next to it, with its sign.
OASES_INLINE uint8_t to_fp8(float y, float offset) {
  const uint32_t exponent = std::max((bits_of(y) >> 23) & 255u, 121u);  // below 2^-6 the steps are 2^-9
  const float step = float_of((exponent - 3) << 23), per_step = float_of((257 - exponent) << 23);
  const float whole = ((y * per_step + offset) + kToInteger) - kToInteger;
  const float value = whole * step;
  const uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
  const uint32_t normal = (bits >> 20) - (120u << 3);
  const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(float_of(bits) * 512.0f));
  return static_cast<uint8_t>((bits < 0x3C800000u ? small : normal) | (bits_of(y) >> 24 & 0x80u));
}

OASES_INLINE float from_fp8(uint8_t code) {
  const int32_t size = code & 0x7F;
  const uint32_t normal = (static_cast<uint32_t>(size) << 20) + (120u << 23);
  const uint32_t small = bits_of(static_cast<float>(size) * 0x1p-9f);
  return float_of((size < 8 ? small : normal) | (code & 0x80u) << 24);
}

// To bf16: `up` in [0, 1) of a step is added before the rest is dropped, or half of one, to nearest even.
OASES_INLINE void encode_bf16(const float* block, bool stochastic, uint32_t index, uint32_t seed,
                              uint8_t* codes) {
  uint16_t whole[kN];
  for (int i = 0; i < kN; ++i) {
    const uint32_t bits = bits_of(block[i]);
    const uint32_t up = stochastic ? static_cast<uint32_t>((noise(index + i, seed) + 0.5f) * 65536.0f)
                                   : 0x7FFFu + ((bits >> 16) & 1u);
    const uint32_t special = (bits & 0x7FFFFFFFu) >= 0x7F800000u;
    const uint32_t quiet = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x00400000u : 0u;
    whole[i] = static_cast<uint16_t>((special ? bits | quiet : bits + up) >> 16);
  }
  std::memcpy(codes, whole, sizeof whole);
}

template <Code code>
OASES_INLINE void encode(float* block, const Quantization& how, uint32_t index, uint32_t seed, uint8_t* codes,
                         float* scale) {
  if constexpr (code == Code::bf16) {
    *scale = 1.0f;
    return encode_bf16(block, how.stochastic, index, seed, codes);
  }
  const uint32_t most = largest_bits(block);
  if (most >= 0x7F800000u) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::memset(codes, 0, code == Code::int4 ? kN / 2 : kN);
    return;
  }
  float largest = float_of(most), lift = 1.0f;
  if (largest < kTiny) lift = kLift;
  if (how.rotated && largest > kHuge) lift = kDrop;
  if (lift != 1.0f)
    for (int i = 0; i < kN; ++i) block[i] *= lift;
  largest *= lift;
  float before = 1.0f;
  if (how.rotated) {
    rotate(block);
    largest = float_of(largest_bits(block));
    before = kBefore;
  }
  *scale = scale_of(largest, 1.0f / (lift * before), largest_code(code));
  // Of the scale as it is stored: a denormal one is rounded.
  const float up = largest == 0.0f ? 0.0f : 1.0f / (*scale * lift * before);
  float offset[kN];
  if (how.stochastic)
    for (int i = 0; i < kN; ++i) offset[i] = noise(index + i, seed);
  else
    for (int i = 0; i < kN; ++i) offset[i] = 0.0f;
  if constexpr (code == Code::fp8) {
    for (int i = 0; i < kN; ++i) {
      const float most_of = 448.0f, y = block[i] * up;
      codes[i] = to_fp8(std::min(std::max(y, -most_of), most_of), offset[i]);
    }
    return;
  }
  int32_t whole[kN];
  constexpr int32_t limit = static_cast<int32_t>(largest_code(code));
  for (int i = 0; i < kN; ++i) {
    const int32_t q = static_cast<int32_t>(bits_of((block[i] * up + offset[i]) + kToInteger)) - 0x4B400000;
    whole[i] = std::min(std::max(q, -limit), limit);
  }
  if constexpr (code == Code::int8)
    for (int i = 0; i < kN; ++i) codes[i] = static_cast<uint8_t>(whole[i]);
  else
    for (int i = 0; i < kN / 2; ++i)
      codes[i] = static_cast<uint8_t>((whole[i] & 15) | (whole[i + kN / 2] & 15) << 4);
}

template <Code code>
OASES_INLINE void decode_codes(const uint8_t* codes, float scale, float* block) {
  if constexpr (code == Code::bf16) {
    uint16_t whole[kN];
    std::memcpy(whole, codes, sizeof whole);
    for (int i = 0; i < kN; ++i) block[i] = float_of(static_cast<uint32_t>(whole[i]) << 16);
  }
  if constexpr (code == Code::int8)
    for (int i = 0; i < kN; ++i) block[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
  if constexpr (code == Code::fp8) {
    float value[kN];  // apart from `block`, which may be the caller's memory: else the loop is not vectorised
    for (int i = 0; i < kN; ++i) value[i] = from_fp8(codes[i]) * scale;
    std::memcpy(block, value, sizeof value);
  }
  if constexpr (code == Code::int4)
    for (int i = 0; i < kN / 2; ++i) {
      block[i] = static_cast<float>(static_cast<int8_t>(codes[i] << 4) >> 4) * scale;
      block[i + kN / 2] = static_cast<float>(static_cast<int8_t>(codes[i]) >> 4) * scale;
    }
}

template <Code code>
OASES_INLINE void decode(const Quantization& how, const uint8_t* codes, float scale, float* block) {
  if (!how.rotated || code == Code::bf16) return decode_codes<code>(codes, scale, block);
  decode_codes<code>(codes, 1.0f, block);
  rotate_back(block, scale);
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

template <Code code>
OASES_INLINE Packed packed_at(const uint8_t* packed, int64_t n) {
  return {packed, packed + quantized_blocks(n) * bytes_of_codes(code)};
}

// x's block and those of the parts.
template <Code code>
OASES_INLINE void sum_of_block(const Quantization& how, const float* x, const uint8_t* parts, int64_t count,
                               int64_t skip, int64_t stride, int64_t n, int64_t b, float* block) {
  alignas(64) float other[kN];
  const int64_t here = std::min<int64_t>(kN, n - b * kN);
  load(x + b * kN, here, block);
  for (int64_t part = 0; part < count; ++part) {
    if (part == skip) continue;
    const Packed from = packed_at<code>(parts + part * stride, n);
    decode<code>(how, from.codes + b * bytes_of_codes(code), from.scale(b), other);
    for (int i = 0; i < kN; ++i) block[i] += other[i];
  }
  std::memset(block + here, 0, (kN - here) * sizeof(float));  // of rotated parts, errors of rounding
}

template <Code code>
OASES_INLINE void quantize_blocks(const Quantization& how, const float* x, const uint8_t* parts,
                                  int64_t count, int64_t skip, int64_t stride, int64_t n, int64_t first,
                                  uint8_t* packed) {
  const int64_t blocks = quantized_blocks(n);
  uint8_t* const scales = packed + blocks * bytes_of_codes(code);
  const uint32_t seed = static_cast<uint32_t>(how.seed ^ (how.seed >> 32));
  alignas(64) float block[kN];
  for (int64_t b = 0; b < blocks; ++b) {
    sum_of_block<code>(how, x, parts, count, skip, stride, n, b, block);
    float scale;
    encode<code>(block, how, static_cast<uint32_t>(first + b * kN), seed, packed + b * bytes_of_codes(code),
                 &scale);
    std::memcpy(scales + b * sizeof(float), &scale, sizeof scale);
  }
}

template <Code code>
OASES_INLINE void sum_blocks(const Quantization& how, const float* x, const uint8_t* parts, int64_t count,
                             int64_t skip, int64_t stride, int64_t n, float* out) {
  alignas(64) float block[kN];
  for (int64_t b = 0; b < quantized_blocks(n); ++b) {
    sum_of_block<code>(how, x, parts, count, skip, stride, n, b, block);
    std::memcpy(out + b * kN, block, std::min<int64_t>(kN, n - b * kN) * sizeof(float));
  }
}

template <Code code>
OASES_INLINE void dequantize_blocks(const Quantization& how, const uint8_t* packed, int64_t n, float* out) {
  const Packed from = packed_at<code>(packed, n);
  alignas(64) float block[kN];
  for (int64_t b = 0; b < quantized_blocks(n); ++b) {
    const int64_t here = std::min<int64_t>(kN, n - b * kN);
    if (here == kN) {
      decode<code>(how, from.codes + b * bytes_of_codes(code), from.scale(b), out + b * kN);
      continue;
    }
    decode<code>(how, from.codes + b * bytes_of_codes(code), from.scale(b), block);
    std::memcpy(out + b * kN, block, here * sizeof(float));
  }
}

#define OASES_QUANTIZED(name, code)                                                                        \
  OASES_FOR_EACH_ISA void quantize_##name(const Quantization& how, const float* x, const uint8_t* parts,   \
                                          int64_t count, int64_t skip, int64_t stride, int64_t n,          \
                                          int64_t first, uint8_t* packed) {                                \
    quantize_blocks<code>(how, x, parts, count, skip, stride, n, first, packed);                           \
  }                                                                                                        \
  OASES_FOR_EACH_ISA void sum_##name(const Quantization& how, const float* x, const uint8_t* parts,        \
                                     int64_t count, int64_t skip, int64_t stride, int64_t n, float* out) { \
    sum_blocks<code>(how, x, parts, count, skip, stride, n, out);                                          \
  }                                                                                                        \
  OASES_FOR_EACH_ISA void dequantize_##name(const Quantization& how, const uint8_t* packed, int64_t n,     \
                                            float* out) {                                                  \
    dequantize_blocks<code>(how, packed, n, out);                                                          \
  }
OASES_QUANTIZED(int8, Code::int8)
OASES_QUANTIZED(fp8, Code::fp8)
OASES_QUANTIZED(int4, Code::int4)
OASES_QUANTIZED(bf16, Code::bf16)
#undef OASES_QUANTIZED

}  // namespace codes

// Calls codes::NAME_int8, _fp8, _int4 or _bf16.
#define OASES_BY_CODE(name, ...)                   \
  switch (how.code) {                              \
    case Code::int8:                               \
      return codes::name##_int8(how, __VA_ARGS__); \
    case Code::fp8:                                \
      return codes::name##_fp8(how, __VA_ARGS__);  \
    case Code::int4:                               \
      return codes::name##_int4(how, __VA_ARGS__); \
    case Code::bf16:                               \
      return codes::name##_bf16(how, __VA_ARGS__); \
  }

void quantize_sum(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                  int64_t stride, int64_t n, int64_t first, uint8_t* packed) {
  OASES_BY_CODE(quantize, x, parts, count, skip, stride, n, first, packed)
}

void sum_parts(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
               int64_t stride, int64_t n, float* out) {
  OASES_BY_CODE(sum, x, parts, count, skip, stride, n, out)
}

void dequantize(const Quantization& how, const uint8_t* packed, int64_t n, float* out) {
  OASES_BY_CODE(dequantize, packed, n, out)
}
#undef OASES_BY_CODE

}  // namespace oases::cpu
