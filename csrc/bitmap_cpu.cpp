#include <algorithm>

#include "bitmap_kernels.h"
#include "scalars.h"

namespace oases::cpu {
namespace {

constexpr int64_t kStep = 256;  // elements between early-exit checks

// Whether a row is not all zeros; the highest bit is the sign.
template <typename Word>
bool is_used(const Word* row, int64_t n) {
  for (int64_t from = 0; from < n; from += kStep) {
    Word any = 0;
    for (int64_t i = from; i < std::min(n, from + kStep); ++i) any |= row[i];
    if (static_cast<Word>(any << 1) != 0) return true;
  }
  return false;
}

template <typename Word>
void pack(const Word* x, int64_t rows, int64_t n, uint8_t* bits) {
  each_row(bitmap_bytes(rows), 8 * n, [&](int64_t byte) {
    unsigned packed = 0;
    for (int64_t row = byte * 8; row < std::min(rows, byte * 8 + 8); ++row) {
      packed |= static_cast<unsigned>(is_used(x + row * n, n)) << (row % 8);
    }
    bits[byte] = static_cast<uint8_t>(packed);
  });
}

// Calls see(row) for the rows of a tile whose bits are set.
template <typename See>
void each_set(const uint8_t* bits, int64_t rows, int64_t tile, const See& see) {
  const int64_t end = std::min(bitmap_bytes(rows), (tile + 1) * kBytesPerTile);
  for (int64_t byte = tile * kBytesPerTile; byte < end; ++byte) {
    for (unsigned left = bits[byte]; left != 0; left &= left - 1) {
      const int64_t row = byte * 8 + __builtin_ctz(left);
      if (row < rows) see(row);
    }
  }
}

}  // namespace

void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits) {
  if (dtype == DType::f32) {
    pack(static_cast<const uint32_t*>(x), rows, n, bits);
  } else {
    pack(static_cast<const uint16_t*>(x), rows, n, bits);
  }
}

void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts) {
  each_row(bitmap_tiles(rows), kBytesPerTile, [&](int64_t tile) {
    int64_t count = 0;
    each_set(bits, rows, tile, [&](int64_t) { ++count; });
    counts[tile] = count;
  });
}

void bitmap_list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                 int64_t* indices) {
  each_row(bitmap_tiles(rows), kBytesPerTile, [&](int64_t tile) {
    int64_t* next = indices + ends[tile] - counts[tile];
    each_set(bits, rows, tile, [&](int64_t row) { *next++ = row; });
  });
}

}  // namespace oases::cpu
