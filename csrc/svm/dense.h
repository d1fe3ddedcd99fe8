// Products of small dense matrices, four vectors at a time, in loops that the compiler vectorises.
#pragma once

#include <algorithm>
#include <cstdint>

namespace oases::svm {

inline double dot(const double* a, const double* b, int64_t n) {
  double sum[8] = {};  // eight sums: a single one is a dependency chain
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sum[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

inline void add_scaled(double* __restrict out, double factor, const double* __restrict a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += factor * a[i];
}

// out [n] += sum_k factors[k] vector(k) [n], in blocks that stay in the cache while all vectors are added.
template <typename Vector>
void add_combination(double* __restrict out, const double* factors, int64_t count, int64_t n, Vector vector) {
  constexpr int64_t kPiece = 2048;
  for (int64_t from = 0; from < n; from += kPiece) {
    const int64_t size = std::min(kPiece, n - from);
    double* __restrict y = out + from;
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      const double f0 = factors[k], f1 = factors[k + 1], f2 = factors[k + 2], f3 = factors[k + 3];
      const double* __restrict a0 = vector(k) + from, * __restrict a1 = vector(k + 1) + from;
      const double* __restrict a2 = vector(k + 2) + from, * __restrict a3 = vector(k + 3) + from;
      for (int64_t i = 0; i < size; ++i) y[i] += (f0 * a0[i] + f1 * a1[i]) + (f2 * a2[i] + f3 * a3[i]);
    }
    for (; k < count; ++k) add_scaled(y, factors[k], vector(k) + from, size);
  }
}

}  // namespace oases::svm
