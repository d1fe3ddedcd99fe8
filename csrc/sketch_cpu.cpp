#include "hashing.h"
#include "medians.h"
#include "scalars.h"
#include "sketch_kernels.h"

namespace oases::cpu {
namespace {

template <int rows>
OASES_VECTORISED void medians(const float* const* cells, const float* signs, int64_t n, float* values) {
  for (int64_t c = 0; c < n; ++c) {
    float found[rows];
    for (int row = 0; row < rows; ++row) found[row] = signs[row] * cells[row][c];
    values[c] = median_of<rows>(found);
  }
}

OASES_VECTORISED void add_signed(float sign, const float* values, int64_t n, float* cell) {
  for (int64_t c = 0; c < n; ++c) cell[c] += sign * values[c];
}

template <int rows>
void decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values) {
  const int64_t n = shape.n;
  each_row(m, n, [&](int64_t i) {
    const float* cells[rows];
    float signs[rows];
    for (int row = 0; row < rows; ++row) {
      const uint64_t hash = hash_of(keys[i], row, shape.seed);
      cells[row] = table + (row * shape.columns + column_of(hash, shape.columns)) * n;
      signs[row] = sign_of(hash);
    }
    medians<rows>(cells, signs, n, values + i * n);
  });
}

}  // namespace

void sketch_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells) {
  for (int64_t row = 0; row < shape.rows; ++row) {
    each_row(m, 1, [&](int64_t i) {
      cells[row * m + i] = row * shape.columns + column_of(hash_of(keys[i], row, shape.seed), shape.columns);
    });
  }
}

void sketch_encode(const int64_t* keys, const float* values, int64_t m, SketchShape shape, bool with_signs,
                   const int64_t*, const int64_t*, float* table) {
  // A task owns some columns of one row and scans all keys: a cell then gets its values in the order of the
  // keys for any number of threads.
  const int64_t parts = (at::get_num_threads() + shape.rows - 1) / shape.rows, n = shape.n;
  at::parallel_for(0, shape.rows * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / parts, part = task % parts;
      for (int64_t i = 0; i < m; ++i) {
        const uint64_t hash = hash_of(keys[i], row, shape.seed);
        const int64_t column = column_of(hash, shape.columns);
        if (column % parts != part) continue;
        const float sign = with_signs ? sign_of(hash) : 1.0f;
        add_signed(sign, values + i * n, n, table + (row * shape.columns + column) * n);
      }
    }
  });
}

void sketch_decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values) {
  (shape.rows == 1 ? decode<1> : shape.rows == 3 ? decode<3> : decode<5>)(table, keys, m, shape, values);
}

}  // namespace oases::cpu
