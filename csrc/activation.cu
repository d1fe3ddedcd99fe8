// Bias + GELU and SwiGLU. A thread owns a pack of columns and iterates over rows, so it loads the bias once
// and sums its gradient in registers.
#include <type_traits>

#include "activation_math.h"
#include "device.h"

namespace oases::cuda {
namespace {

constexpr int kRows = 8;           // threads of a block along the rows
constexpr int64_t kBlocks = 2048;  // enough for every device, so that sums are equal on all of them

// Blocks of 32 packs by kRows rows; rows are split until there are kBlocks of them.
dim3 grid_of(int64_t rows, int64_t n, int width) {
  const int64_t across = (n + 32 * width - 1) / (32 * width);
  const int64_t splits =
      std::max<int64_t>(1, std::min((rows + kRows - 1) / kRows, (kBlocks + across - 1) / across));
  return dim3(static_cast<unsigned>(across), static_cast<unsigned>(splits));
}

template <int width>
__device__ __forceinline__ int64_t own_column() {
  return (int64_t{blockIdx.x} * 32 + threadIdx.x) * width;
}

// Calls f(row) for the rows of this thread.
template <typename F>
__device__ __forceinline__ void each_row(int64_t rows, F f) {
  const int64_t stride = int64_t{gridDim.y} * kRows;
  for (int64_t row = int64_t{blockIdx.y} * kRows + threadIdx.y; row < rows; row += stride) f(row);
}

template <typename T, int width>
__device__ __forceinline__ void load_bias(const T* bias, int64_t column, float (&to)[width]) {
  if (!bias) return;
  const auto pack = Pack<T, width>::load(bias + column);
#pragma unroll
  for (int i = 0; i < width; ++i) to[i] = pack[i];
}

template <typename T, int width>
__global__ void __launch_bounds__(32 * kRows)
    gelu_kernel(Gelu kind, int64_t rows, int64_t n, const T* x, const T* bias, T* out) {
  using P = Pack<T, width>;
  const int64_t column = own_column<width>();
  if (column >= n) return;
  float added[width] = {};
  load_bias<T, width>(bias, column, added);
  each_row(rows, [&](int64_t row) {
    P pack = P::load(x + row * n + column);
#pragma unroll
    for (int i = 0; i < width; ++i) pack.set(i, gelu_of(kind, pack[i] + added[i]));
    pack.store(out + row * n + column);
  });
}

template <typename T, int width>
__global__ void __launch_bounds__(32 * kRows)
    gelu_backward_kernel(Gelu kind, int64_t rows, int64_t n, const T* grad, const T* x, const T* bias,
                         T* grad_x, float* partials) {
  using P = Pack<T, width>;
  __shared__ float parts[kRows][width][32];
  const int64_t column = own_column<width>();
  float sum[width] = {};
  if (column < n) {
    float added[width] = {};
    load_bias<T, width>(bias, column, added);
    each_row(rows, [&](int64_t row) {
      const P g = P::load(grad + row * n + column);
      P pack = P::load(x + row * n + column);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float value = g[i] * gelu_slope(kind, pack[i] + added[i]);
        pack.set(i, value);
        sum[i] += value;
      }
      pack.store(grad_x + row * n + column);
    });
  }
  if (!partials) return;
#pragma unroll
  for (int i = 0; i < width; ++i) parts[threadIdx.y][i][threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
#pragma unroll
  for (int i = 0; i < width; ++i) {
    for (int y = 1; y < kRows; ++y) sum[i] += parts[y][i][threadIdx.x];
    partials[blockIdx.y * n + column + i] = sum[i];
  }
}

template <typename T, int width>
__global__ void __launch_bounds__(32 * kRows)
    swiglu_kernel(int64_t rows, int64_t n, Halves<const T> x, T* out) {
  using P = Pack<T, width>;
  const int64_t column = own_column<width>();
  if (column >= n) return;
  each_row(rows, [&](int64_t row) {
    const int64_t at = row * x.stride + column;
    P pack = P::load(x.gate + at);
    const P up = P::load(x.up + at);
#pragma unroll
    for (int i = 0; i < width; ++i) pack.set(i, silu_of(pack[i]) * up[i]);
    pack.store(out + row * n + column);
  });
}

template <typename T, int width>
__global__ void __launch_bounds__(32 * kRows)
    swiglu_backward_kernel(int64_t rows, int64_t n, const T* grad, Halves<const T> x, Halves<T> grads) {
  using P = Pack<T, width>;
  const int64_t column = own_column<width>();
  if (column >= n) return;
  each_row(rows, [&](int64_t row) {
    const int64_t at = row * x.stride + column;
    const P g = P::load(grad + row * n + column);
    P gate = P::load(x.gate + at), up = P::load(x.up + at);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float of_gate = g[i] * up[i] * silu_slope(gate[i]);
      up.set(i, g[i] * silu_of(gate[i]));
      gate.set(i, of_gate);
    }
    gate.store(grads.gate + at);
    up.store(grads.up + at);
  });
}

// Calls f(T{}, width) with the dtype's type and 16 bytes of it, or 1 if the rows are not aligned.
template <typename F>
void with_width(DType dtype, int64_t n, bool is_aligned, F f) {
  with_type(dtype, [&](auto type) {
    constexpr int wide = kWide<decltype(type)>;
    if (is_aligned && n % wide == 0)
      f(type, std::integral_constant<int, wide>{});
    else
      f(type, std::integral_constant<int, 1>{});
  });
}

const dim3 kBlock(32, kRows);

}  // namespace

void gelu(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* x, const void* bias, void* out,
          void* stream) {
  if (rows == 0 || n == 0) return;
  with_width(dtype, n, aligned({x, bias, out}), [&](auto type, auto width) {
    using T = decltype(type);
    launch("gelu", gelu_kernel<T, decltype(width)::value>, grid_of(rows, n, decltype(width)::value), kBlock,
           0, stream, kind, rows, n, static_cast<const T*>(x), static_cast<const T*>(bias),
           static_cast<T*>(out));
  });
}

// Independent of the pointers: unaligned blocks of scalars use the same number.
int64_t gelu_backward_blocks(DType dtype, int64_t rows, int64_t n) {
  const int wide = dtype == DType::f32 ? 4 : 8;
  return n == 0 ? 0 : grid_of(rows, n, n % wide ? 1 : wide).y;
}

void gelu_backward(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* grad, const void* x,
                   const void* bias, void* grad_x, float* partials, void* grad_bias, void* stream) {
  if (rows == 0 || n == 0) return;
  with_width(dtype, n, aligned({grad, x, bias, grad_x}), [&](auto type, auto width) {
    using T = decltype(type);
    dim3 grid = grid_of(rows, n, decltype(width)::value);
    if (grad_bias) grid.y = static_cast<unsigned>(gelu_backward_blocks(dtype, rows, n));
    launch("gelu_backward", gelu_backward_kernel<T, decltype(width)::value>, grid, kBlock, 0, stream, kind,
           rows, n, static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(bias),
           static_cast<T*>(grad_x), grad_bias ? partials : nullptr);
    if (grad_bias) launch_sum_partials<T, 1>("gelu_backward", {partials, grid.y, n, 1, {grad_bias}}, stream);
  });
}

void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, const void* up, void* out, void* stream) {
  if (rows == 0 || n == 0) return;
  with_width(dtype, n, aligned({x, up, out}), [&](auto type, auto width) {
    using T = decltype(type);
    launch("swiglu", swiglu_kernel<T, decltype(width)::value>, grid_of(rows, n, decltype(width)::value),
           kBlock, 0, stream, rows, n, halves_of<const T>(x, up, n), static_cast<T*>(out));
  });
}

void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, const void* up,
                     void* grad_x, void* grad_up, void* stream) {
  if (rows == 0 || n == 0) return;
  with_width(dtype, n, aligned({grad, x, up, grad_x, grad_up}), [&](auto type, auto width) {
    using T = decltype(type);
    launch("swiglu_backward", swiglu_backward_kernel<T, decltype(width)::value>,
           grid_of(rows, n, decltype(width)::value), kBlock, 0, stream, rows, n, static_cast<const T*>(grad),
           halves_of<const T>(x, up, n), halves_of<T>(grad_x, grad_up, n));
  });
}

}  // namespace oases::cuda
