// Which rows of a matrix are not zero, one bit each: row r is bit r % 8 of byte r / 8, the lowest bit first.
// Pointers are to dense arrays. CUDA launchers enqueue on `stream` and throw std::runtime_error with a CUDA
// error's text.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "kernels.h"

namespace oases {

// Bytes whose bits one block, or one task on CPU, counts and lists.
constexpr int64_t kBytesPerTile = 1024;
OASES_HOST_DEVICE int64_t bitmap_bytes(int64_t rows) { return rows / 8 + (rows % 8 != 0); }
inline int64_t bitmap_tiles(int64_t rows) { return (bitmap_bytes(rows) + kBytesPerTile - 1) / kBytesPerTile; }

namespace cuda {

// bits [bitmap_bytes(rows)] of x [rows, n]. NaN and infinities are not zero, -0 is.
void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits, void* stream);
// counts [bitmap_tiles(rows)]: the bits that are set among the first `rows`.
void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts, void* stream);
// indices: the rows whose bits are set, in ascending order, those of each tile from ends[tile] - counts[tile]
// on.
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
