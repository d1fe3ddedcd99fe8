// Bitmaps of the nonzero rows of a matrix: row r is bit r % 8 of byte r / 8, lowest bit first.
// Pointers are to dense arrays. CUDA launchers enqueue on `stream` and throw std::runtime_error
// with the CUDA error's text.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "kernels.h"

namespace oases {

// Bytes whose bits one block, or one task on the CPU, counts and lists.
constexpr int64_t kBytesPerTile = 1024;
OASES_HOST_DEVICE int64_t bitmap_bytes(int64_t rows) { return rows / 8 + (rows % 8 != 0); }
inline int64_t bitmap_tiles(int64_t rows) { return (bitmap_bytes(rows) + kBytesPerTile - 1) / kBytesPerTile; }

namespace cuda {

// bits [bitmap_bytes(rows)] of x [rows, n]. NaN and infinities are nonzero, -0 is zero.
void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits, void* stream);
// counts [bitmap_tiles(rows)]: set bits among the first `rows`.
void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts, void* stream);
// indices: rows whose bits are set, ascending; those of each tile start at ends[tile] - counts[tile].
void bitmap_list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                 int64_t* indices, void* stream);

}  // namespace cuda

namespace cpu {

void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits);
void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts);
void bitmap_list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                 int64_t* indices);

}  // namespace cpu
}  // namespace oases
