// Shared by kernels: launches, 16-byte packs of numbers, row sums, sums of partial sums. Only for *.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace oases::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Every launch comes here, which lets the tests run kernels on the CPU (cpp_tests/emulated). `name`, that of the
// launcher, opens the message where the launch fails.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t shared_bytes,
            void* stream, Arguments... arguments) {
  if (blocks.x == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Dynamic shared memory.
template <typename T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Numbers that are loaded and stored together.
template <typename T, int width>
struct alignas(width * sizeof(T)) Pack {
  T values[width];

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }
  __device__ __forceinline__ void set(int i, float x) { values[i] = from_float<T>(x); }
  __device__ __forceinline__ static Pack load(const T* from) { return *reinterpret_cast<const Pack*>(from); }
  // Through an instruction of 16 bytes where the pack has as many: ptxas for sm_80 to sm_90 splits the store of
  // a struct into one per number.
  __device__ __forceinline__ void store(T* to) const {
    if constexpr (sizeof(Pack) == 16) {
      uint4 bits;
      memcpy(&bits, values, sizeof bits);
      __stwb(reinterpret_cast<uint4*>(to), bits);
    } else {
      *reinterpret_cast<Pack*>(to) = *this;
    }
  }
};

// Numbers in 16 bytes.
template <typename T>
constexpr int kWide = 16 / sizeof(T);

inline bool aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

// Calls f with a value of the type of `dtype`.
template <typename F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
  }
}

// Sum over threadIdx.x, in the same order on every run, returned to every thread. blockDim.x is a multiple of
// 32; if it is 32, warps are independent and need not call this together.
__device__ __forceinline__ float2 sum_over_x(float2 value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, step);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, step);
  }
  if (blockDim.x == 32) return value;
  __shared__ float2 of_warp[32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // all threads have read the previous sum
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? of_warp[lane] : make_float2(0.0f, 0.0f);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, step);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, step);
  }
  return value;
}

__device__ __forceinline__ float sum_over_x(float value) { return sum_over_x(make_float2(value, 0.0f)).x; }

// Partial sums of a row of n are stored in fours: the fours of one thread's pack of `width` columns are n
// * 4 / width apart, so that adjacent threads access adjacent banks. Offset of number i of a pack from
// the pack's first number.
template <int width, typename Index>
__device__ __forceinline__ Index place_in_pack(int i, Index n) {
  return width > 4 ? i / 4 * (n / width * 4) + i % 4 : i;
}

// Offset of a column from the row's first number.
template <int width, typename Index>
__device__ __forceinline__ Index slot(Index column, Index n) {
  if (width <= 4) return column;
  return column / width * 4 + place_in_pack<width>(static_cast<int>(column % width), n);
}

// Adds to the partial sums of one pack; only the thread that owns the columns calls it.
template <int width, typename Index>
__device__ __forceinline__ void accumulate(float* sums, Index column, Index n, const float (&value)[width]) {
  float* const to = sums + slot<width>(column, n);
  if constexpr (width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < width; i += 4) {
      float4& four = *reinterpret_cast<float4*>(to + place_in_pack<width>(i, n));
      const float4 old = four;
      four = make_float4(old.x + value[i], old.y + value[i + 1], old.z + value[i + 2], old.w + value[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) to[i] += value[i];
  }
}

struct Sums {
  const float* partials;  // [blocks, count, n], each row of n in the order of slot<width>
  int64_t blocks, n;
  int count;
  void* outs[3];  // [n] each
};

constexpr int kSumRows = 16;

// Second stage of every sum over rows: one column per threadIdx.x, partial sums added in a fixed order.
template <typename T, int width>
__global__ void __launch_bounds__(32 * kSumRows) sum_partials(Sums sums) {
  __shared__ float parts[kSumRows][32];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const int which = static_cast<int>(blockIdx.y);
  float sum = 0;
  if (column < sums.n) {
    const float* from = sums.partials + which * sums.n + slot<width>(column, sums.n);
    for (int64_t block = threadIdx.y; block < sums.blocks; block += kSumRows)
      sum += from[block * sums.count * sums.n];
  }
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= sums.n) return;
  for (int row = 1; row < kSumRows; ++row) sum += parts[row][threadIdx.x];
  // Selected, not indexed: an index would put the array into local memory.
  void* out = which == 0 ? sums.outs[0] : which == 1 ? sums.outs[1] : sums.outs[2];
  static_cast<T*>(out)[column] = from_float<T>(sum);
}

template <typename T, int width>
void launch_sum_partials(const char* name, const Sums& sums, void* stream) {
  const dim3 grid(static_cast<unsigned>((sums.n + 31) / 32), static_cast<unsigned>(sums.count));
  launch(name, sum_partials<T, width>, grid, dim3(32, kSumRows), 0, stream, sums);
}

}  // namespace oases::cuda
