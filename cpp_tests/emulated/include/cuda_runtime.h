// CUDA's language and runtime, as far as csrc/*.cu use them, for g++: kernels run on the CPU under a machine
// (machine.h) that checks every access to memory. Shared memory is thread_local, because then it has a
// segment of its own, and `extern` arrays of it are valid C++.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static const dim3 &threadIdx = ::emulated::here.thread, &blockIdx = ::emulated::here.block,
                  &blockDim = ::emulated::here.block_size, &gridDim = ::emulated::here.grid_size;

// ---- barriers and warps; `line` tells whether the threads of one barrier came by the same statement

inline void __syncthreads(int line = __builtin_LINE()) { ::emulated::wait_for_block(line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  ::emulated::exchange(mask, 0, line);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int line = __builtin_LINE()) {
  return ::emulated::exchange(mask, value, line)[from % 32];
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
  const int lane = ::emulated::here.lane();
  return ::emulated::exchange(mask, value, line)[lane ^ lanes];
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
  const int lane = ::emulated::here.lane();
  const auto all = ::emulated::exchange(mask, value, line);
  return lane >= lanes ? all[lane - lanes] : value;
}
inline unsigned __ballot_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  const auto all = ::emulated::exchange(mask, vote, line);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= unsigned{all[lane] != 0} << lane;
  return votes;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, int line = __builtin_LINE()) {
  const auto all = ::emulated::exchange(mask, value, line);
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= unsigned{all[lane] == value} << lane;
  return same;
}

// ---- instructions

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void __stwb(uint4* to, uint4 value) { *to = value; }
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  ::emulated::access(at, sizeof *at, ::emulated::Use::atomic, __builtin_return_address(0));
  return ::emulated::unchecked([&] {
    const auto old = *at;
    *at = std::min(old, value);
    return old;
  });
}

// ---- the runtime

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaMemcpyDeviceToDevice };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> given(arguments...);
  ::emulated::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                     [&] { std::apply(kernel, given); });
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? 3 : ::emulated::kSharedBytes;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  ::emulated::host_copy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  ::emulated::host_fill(to, value, bytes);
  return cudaSuccess;
}
