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

// Multiplies a block by the Hadamard matrix, which is its own inverse times 128: sums and differences of numbers 16, 32,
// 64, 1, 2, 4 and 8 apart, the order of quantize.cu.
OASES_INLINE void hadamard(float* x) {
  // Eight numbers: wider rows, and permutations that are not constant, become loops over single numbers with AVX2.
  typedef float Row __attribute__((vector_size(32)));
  typedef int32_t Places __attribute__((vector_size(32)));
  constexpr int kRows = kN / 8;
  Row rows[kRows];
  std::memcpy(rows, x, sizeof rows);
#pragma GCC unroll 3
  for (int half = 2; half < kRows; half *= 2)
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
      if (!(row & half)) {
        const Row low = rows[row], high = rows[row + half];
        rows[row] = low + high;
        rows[row + half] = low - high;
      }
#pragma GCC unroll 16
  for (Row& row : rows) {
    row = __builtin_shuffle(row, Places{1, 0, 3, 2, 5, 4, 7, 6}) + row * Row{1, -1, 1, -1, 1, -1, 1, -1};
    row = __builtin_shuffle(row, Places{2, 3, 0, 1, 6, 7, 4, 5}) + row * Row{1, 1, -1, -1, 1, 1, -1, -1};
    row = __builtin_shuffle(row, Places{4, 5, 6, 7, 0, 1, 2, 3}) + row * Row{1, 1, 1, 1, -1, -1, -1, -1};
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row += 2) {
    const Row low = rows[row], high = rows[row + 1];
    rows[row] = low + high;
    rows[row + 1] = low - high;
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

// Undoes `rotate` on a block of codes.
OASES_INLINE void rotate_back(float* block, float scale) {
  hadamard(block);
  for (int i = 0; i < kN; ++i) block[i] = rotated_back(block[i], i, scale);
}

// The largest size of a number in a block, as bits: of an infinity or a NaN at least 0x7F800000.
OASES_INLINE uint32_t largest_bits(const float* block) {
  uint32_t most = 0;
  for (int i = 0; i < kN; ++i) most = std::max(most, bits_of(block[i]) & 0x7FFFFFFFu);
  return most;
}

template <Code code>
OASES_INLINE void encode(float* block, const Quantization& how, uint32_t index, uint32_t seed, uint8_t* codes,
                         float* scale) {
  if constexpr (code == Code::bf16) {
    *scale = 1.0f;
    uint16_t whole[kN];
    for (int i = 0; i < kN; ++i) whole[i] = to_bf16(block[i], how.stochastic, index + i, seed);
    std::memcpy(codes, whole, sizeof whole);
    return;
  }
  const uint32_t most = largest_bits(block);
  if (most >= kInfinite) {
    *scale = float_of(kNan);
    std::memset(codes, 0, bytes_of_codes(code));
    return;
  }
  float largest = float_of(most), before = 1.0f;
  const float lift = lift_of(largest, how.rotated);
  if (lift != 1.0f)
    for (int i = 0; i < kN; ++i) block[i] *= lift;
  largest *= lift;
  if (how.rotated) {
    rotate(block);
    largest = float_of(largest_bits(block));
    before = kBefore;
  }
  *scale = scale_of(largest, 1.0f / (lift * before), largest_code(code));
  const float up = to_codes(largest, *scale, lift, before);
  float offset[kN];
  if (how.stochastic)
    for (int i = 0; i < kN; ++i) offset[i] = noise(index + i, seed);
  else
    for (int i = 0; i < kN; ++i) offset[i] = 0.0f;
  if constexpr (code == Code::fp8) {
    for (int i = 0; i < kN; ++i)
      block[i] = within(block[i] * up, 448.0f);  // in one loop neither is vectorised
    for (int i = 0; i < kN; ++i) codes[i] = to_fp8(block[i], offset[i]);
    return;
  }
  int32_t whole[kN];
  constexpr int32_t limit = static_cast<int32_t>(largest_code(code));
  for (int i = 0; i < kN; ++i) whole[i] = to_whole(block[i], up, offset[i], limit);
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
    for (int i = 0; i < kN; ++i) block[i] = from_bf16(whole[i]);
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
  const uint32_t seed = folded(how.seed);
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

}  // namespace oases::codes

namespace oases::cpu {

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
