// CPU counterpart of device.h: C++ types of the dtypes, parallel rows, sums of partial sums.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

#include "kernels.h"

// A loop over numbers to vectorise, which the compiler does not do by itself at -O2.
#if defined(__GNUC__) && !defined(__clang__)
#define OASES_VECTORISED __attribute__((optimize("O3")))
#else
#define OASES_VECTORISED
#endif

namespace oases::cpu {

// Calls f with a value of the type of `dtype`.
template <typename F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(c10::Half{});
    case DType::bf16:
      return f(c10::BFloat16{});
  }
}

// Calls f(row) for every row, in parallel if there is enough work.
template <typename F>
void each_row(int64_t rows, int64_t n, F f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1)),
                   [&](int64_t from, int64_t to) {
                     for (int64_t row = from; row < to; ++row) f(row);
                   });
}

// Number of row blocks of a sum: independent of the number of threads, so that sums are too.
inline int64_t row_blocks(int64_t rows) { return std::min<int64_t>(rows, 64); }

// Calls f(block, row) for every row; the rows of a block run in order on one thread.
template <typename F>
void each_row_of_blocks(int64_t rows, int64_t blocks, F f) {
  at::parallel_for(0, blocks, 1, [&](int64_t from, int64_t to) {
    for (int64_t block = from; block < to; ++block)
      for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; ++row) f(block, row);
  });
}

// out[column] = the sum over blocks of partials[block * stride + column].
template <typename T>
void sum_partials(const float* partials, int64_t blocks, int64_t stride, int64_t n, T* out) {
  at::parallel_for(0, n, 1024, [&](int64_t from, int64_t to) {
    for (int64_t column = from; column < to; ++column) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += partials[block * stride + column];
      out[column] = static_cast<T>(static_cast<float>(sum));
    }
  });
}

}  // namespace oases::cpu
