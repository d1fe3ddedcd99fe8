// Count sketches of sparse gradients. Values are vectors of n fp32 numbers with int64 keys; a sketch
// has `rows` rows of `columns` cells, and cell (row, column) is numbered row * columns + column.
// Pointers are to dense row-major arrays. CUDA launchers enqueue on `stream` and throw
// std::runtime_error with the CUDA error's text.
#pragma once

#include <cstdint>

namespace oases {

struct SketchShape {
  int64_t rows, columns, n, seed;
};

namespace cuda {

// cells [rows, m]: the cell of every key in every row.
void sketch_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells, void* stream);

// table [rows, columns, n], initially zero: the values [m, n] of each key are added to its cells, in order of
// the keys and, if with_signs, with the sign of key and row. On CUDA, sorted holds the cells in ascending
// order and order the entry of cells [rows, m] of each; both are null on the CPU.
void sketch_encode(const int64_t* keys, const float* values, int64_t m, SketchShape shape, bool with_signs,
                   const int64_t* sorted, const int64_t* order, float* table, void* stream);

// values [m, n]: the median over the rows (1, 3 or 5) of the signed cells of each key.
void sketch_decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values,
                   void* stream);

}  // namespace cuda

namespace cpu {

void sketch_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells);
void sketch_encode(const int64_t* keys, const float* values, int64_t m, SketchShape shape, bool with_signs,
                   const int64_t* sorted, const int64_t* order, float* table);
void sketch_decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values);

}  // namespace cpu
}  // namespace oases
