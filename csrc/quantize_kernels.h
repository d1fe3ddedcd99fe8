// Numbers of 8 or 4 bits with an fp32 scale per block of 128, for collectives that send less (quantized_backend.h).
// A packed part of n numbers is its codes, ceil(n / 128) blocks of them, then the scales of the blocks. A block that
// holds a NaN or an infinity has the scale NaN, so that all of it decodes to NaN: seen, not clamped (in bf16 they
// travel as they are).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "host_device.h"

namespace oases {

// fp8: e4m3. bf16: for sums whose error is too large in the others; its numbers need no scale, theirs is 1.
enum class Code { int8, fp8, int4, bf16 };

constexpr int64_t kQuantizedBlock = 128;

// stochastic: round up or down at random, so that the mean is the number itself; else to nearest. rotated: multiply
// each block by random signs, equal on all ranks, and by a Hadamard matrix first, which spreads outliers over the
// block; not of bf16. seed: of the stochastic rounding.
struct Quantization {
  Code code = Code::int8;
  bool stochastic = false, rotated = false;
  uint64_t seed = 0;
};

// By a wire's name, such as "int8" or "int4:rotated:stochastic"; throws std::out_of_range for an unknown one.
inline Quantization quantization_called(const std::string& name) {
  static const std::map<std::string, Code> codes{
      {"int8", Code::int8}, {"fp8", Code::fp8}, {"int4", Code::int4}, {"bf16", Code::bf16}};
  const size_t end = name.find(':');
  Quantization found{codes.at(name.substr(0, end))};
  static const std::map<std::string, std::pair<bool, bool>> options{{"", {false, false}},
                                                                    {":rotated", {true, false}},
                                                                    {":stochastic", {false, true}},
                                                                    {":rotated:stochastic", {true, true}}};
  std::tie(found.rotated, found.stochastic) = options.at(end == std::string::npos ? "" : name.substr(end));
  return found;
}

inline std::string name_of(const Quantization& how) {
  static const std::map<Code, std::string> names{
      {Code::int8, "int8"}, {Code::fp8, "fp8"}, {Code::int4, "int4"}, {Code::bf16, "bf16"}};
  return names.at(how.code) + (how.rotated ? ":rotated" : "") + (how.stochastic ? ":stochastic" : "");
}

OASES_HOST_DEVICE int64_t quantized_blocks(int64_t n) { return (n + kQuantizedBlock - 1) / kQuantizedBlock; }

// Of a block's codes.
OASES_HOST_DEVICE constexpr int64_t bytes_of_codes(Code code) {
  return code == Code::int4   ? kQuantizedBlock / 2
         : code == Code::bf16 ? kQuantizedBlock * 2
                              : kQuantizedBlock;
}

OASES_HOST_DEVICE int64_t packed_bytes(Code code, int64_t n) {
  return quantized_blocks(n) * (bytes_of_codes(code) + static_cast<int64_t>(sizeof(float)));
}

// CUDA launchers enqueue on `stream`, and throw std::runtime_error with CUDA's text; packed numbers are aligned to 4
// bytes there.

namespace cuda {

void quantize_sum(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                  int64_t stride, int64_t n, int64_t first, uint8_t* packed, void* stream);
void sum_parts(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
               int64_t stride, int64_t n, float* out, void* stream);
void dequantize(const Quantization& how, const uint8_t* packed, int64_t n, float* out, void* stream);

}  // namespace cuda

namespace cpu {

// The sum of x [n] and of `count` packed parts of it, `stride` bytes apart, but for part `skip` -> packed; count is 0
// for x alone. Sums are made in fp32, in the order of the parts. first: index of x[0] in the whole tensor, for random
// numbers.
void quantize_sum(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                  int64_t stride, int64_t n, int64_t first, uint8_t* packed);
// The same -> out [n], in fp32.
void sum_parts(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
               int64_t stride, int64_t n, float* out);
// packed -> out [n].
void dequantize(const Quantization& how, const uint8_t* packed, int64_t n, float* out);

}  // namespace cpu
}  // namespace oases
