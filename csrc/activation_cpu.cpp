#include "activation_math.h"
#include "scalars.h"

namespace oases::cpu {
namespace {

template <typename T>
float with_bias(const T* x, const T* bias, int64_t i) {
  return static_cast<float>(x[i]) + (bias ? static_cast<float>(bias[i]) : 0.0f);
}

}  // namespace

void gelu(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* x, const void* bias, void* out) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    each_row(rows, n, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * n;
      T* to = static_cast<T*>(out) + row * n;
      for (int64_t i = 0; i < n; ++i)
        to[i] = static_cast<T>(gelu_of(kind, with_bias(from, static_cast<const T*>(bias), i)));
    });
  });
}

int64_t gelu_backward_blocks(DType, int64_t rows, int64_t) { return row_blocks(rows); }

void gelu_backward(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* grad, const void* x,
                   const void* bias, void* grad_x, float* partials, void* grad_bias) {
  const int64_t blocks = row_blocks(rows);
  if (grad_bias) std::fill_n(partials, blocks * n, 0.0f);
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    each_row_of_blocks(rows, blocks, [&](int64_t block, int64_t row) {
      const T *g = static_cast<const T*>(grad) + row * n, *from = static_cast<const T*>(x) + row * n;
      T* to = static_cast<T*>(grad_x) + row * n;
      for (int64_t i = 0; i < n; ++i) {
        const float slope = gelu_slope(kind, with_bias(from, static_cast<const T*>(bias), i));
        const float value = static_cast<float>(g[i]) * slope;
        to[i] = static_cast<T>(value);
        if (grad_bias) partials[block * n + i] += value;
      }
    });
    if (grad_bias) sum_partials(partials, blocks, n, n, static_cast<T*>(grad_bias));
  });
}

void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, const void* up, void* out) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto from = halves_of<const T>(x, up, n);
    each_row(rows, n, [&](int64_t row) {
      const T *gate = from.gate + row * from.stride, *up = from.up + row * from.stride;
      T* to = static_cast<T*>(out) + row * n;
      for (int64_t i = 0; i < n; ++i)
        to[i] = static_cast<T>(silu_of(static_cast<float>(gate[i])) * static_cast<float>(up[i]));
    });
  });
}

void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, const void* up,
                     void* grad_x, void* grad_up) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto from = halves_of<const T>(x, up, n);
    const auto to = halves_of<T>(grad_x, grad_up, n);
    each_row(rows, n, [&](int64_t row) {
      const T *g = static_cast<const T*>(grad) + row * n, *gate = from.gate + row * from.stride;
      const T* up = from.up + row * from.stride;
      T *of_gate = to.gate + row * to.stride, *of_up = to.up + row * to.stride;
      for (int64_t i = 0; i < n; ++i) {
        const float grad_out = static_cast<float>(g[i]), value = static_cast<float>(gate[i]);
        of_gate[i] = static_cast<T>(grad_out * static_cast<float>(up[i]) * silu_slope(value));
        of_up[i] = static_cast<T>(grad_out * silu_of(value));
      }
    });
  });
}

}  // namespace oases::cpu
