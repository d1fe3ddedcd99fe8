// Numbers of 8 bits with an fp32 scale per block of 128, for collectives that send less (quantized_backend.h).
// A packed part of n numbers is ceil(n / 128) blocks of int8 codes, then the scales of the blocks. A block that holds a
// NaN or an infinity has the scale NaN, so that all of it decodes to NaN: seen, not clamped.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace oases {

constexpr int64_t kQuantizedBlock = 128;

OASES_HOST_DEVICE int64_t quantized_blocks(int64_t n) { return (n + kQuantizedBlock - 1) / kQuantizedBlock; }

OASES_HOST_DEVICE int64_t packed_bytes(int64_t n) {
  return quantized_blocks(n) * (kQuantizedBlock + static_cast<int64_t>(sizeof(float)));
}

// CUDA launchers enqueue on `stream`, and throw std::runtime_error with CUDA's text; packed numbers are aligned to 4
// bytes there.

namespace cuda {

void quantize_sum(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride,
                  int64_t n, uint8_t* packed, void* stream);
void sum_parts(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride, int64_t n,
               float* out, void* stream);
void dequantize(const uint8_t* packed, int64_t n, float* out, void* stream);

}  // namespace cuda

namespace cpu {

// The sum of x [n] and of `count` packed parts of it, `stride` bytes apart, but for part `skip` -> packed; count is 0
// for x alone. Sums are made in fp32, in the order of the parts.
void quantize_sum(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride,
                  int64_t n, uint8_t* packed);
// The same -> out [n], in fp32.
void sum_parts(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride, int64_t n,
               float* out);
// packed -> out [n].
void dequantize(const uint8_t* packed, int64_t n, float* out);

}  // namespace cpu
}  // namespace oases
