// Sums over sorted cells, one thread per sum and in the order of the keys, so that they are reproducible and
// equal to those on the CPU.
#include "sketch_kernels.h"

#include "hashing.h"
#include "launch.h"
#include "medians.h"

namespace oases::cuda {
namespace {

__global__ void find_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells) {
  for (int64_t i = first_item(); i < m * shape.rows; i += item_stride()) {
    const int64_t row = i / m;
    cells[i] = row * shape.columns + column_of(hash_of(keys[i % m], row, shape.seed), shape.columns);
  }
}

// One row of threads per entry; only the first entry of a cell works, for the whole cell.
__global__ void sum_cells(const int64_t* keys, const float* values, int64_t m, SketchShape shape,
                          bool with_signs, const int64_t* sorted, const int64_t* order, float* table) {
  const int64_t entries = m * shape.rows, n = shape.n;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < entries; i += stride) {
    const int64_t cell = sorted[i];
    if (i > 0 && sorted[i - 1] == cell) continue;
    const int64_t row = cell / shape.columns;
    for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
      float sum = 0;
      for (int64_t next = i; next < entries && sorted[next] == cell; ++next) {
        const int64_t entry = order[next] - row * m;
        const float value = values[entry * n + c];
        sum += with_signs ? sign_of(hash_of(keys[entry], row, shape.seed)) * value : value;
      }
      table[cell * n + c] = sum;
    }
  }
}

template <int rows>
__global__ void decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values) {
  const int64_t n = shape.n, stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < m; i += stride) {
    const float* cells[rows];
    float signs[rows];
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      const uint64_t hash = hash_of(keys[i], row, shape.seed);
      cells[row] = table + (row * shape.columns + column_of(hash, shape.columns)) * n;
      signs[row] = sign_of(hash);
    }
    for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
      float found[rows];
#pragma unroll
      for (int row = 0; row < rows; ++row) found[row] = signs[row] * cells[row][c];
      values[i * n + c] = median_of<rows>(found);
    }
  }
}

}  // namespace

void sketch_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells, void* stream) {
  launch("sketch_cells", find_cells, blocks_for(m * shape.rows, kThreads), kThreads, 0, stream, keys, m,
         shape, cells);
}

void sketch_encode(const int64_t* keys, const float* values, int64_t m, SketchShape shape, bool with_signs,
                   const int64_t* sorted, const int64_t* order, float* table, void* stream) {
  const dim3 block = block_over(shape.n);
  launch("sketch_encode", sum_cells, blocks_for(m * shape.rows, block.y), block, 0, stream, keys, values, m,
         shape, with_signs, sorted, order, table);
}

void sketch_decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values,
                   void* stream) {
  const dim3 block = block_over(shape.n);
  const auto kernel = shape.rows == 1 ? decode<1> : shape.rows == 3 ? decode<3> : decode<5>;
  launch("sketch_decode", kernel, blocks_for(m, block.y), block, 0, stream, table, keys, m, shape, values);
}

}  // namespace oases::cuda
