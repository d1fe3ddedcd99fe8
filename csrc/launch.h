// Helpers of kernels that iterate over items or warps. Only for *.cu.
#pragma once

#include "device.h"

namespace oases::cuda {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;

// Blocks that cover `items`; kernels use grid-stride loops, so fewer blocks also work.
inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(std::min<int64_t>((items + per_block - 1) / per_block, 1 << 20));
}

// A block of kThreads: as many threads along a row as it has units, at most all, the rest over rows.
inline dim3 block_over(int64_t units) {
  unsigned along = 1;
  while (along < units && along < kThreads) along *= 2;
  return dim3(along, kThreads / along);
}

// Index of this thread in the grid, and their number, for one-dimensional blocks.
__device__ inline int64_t first_item() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t item_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Inclusive prefix sum of `mine` over the lanes. All lanes must call it.
__device__ inline int64_t sum_up_to_lane(int64_t mine, int lane) {
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, mine, step);
    if (lane >= step) mine += below;
  }
  return mine;
}

// CUDA has atomics only for this unsigned type; sums wrap around as intended.
__device__ inline unsigned long long* as_unsigned(int64_t* p) {
  return reinterpret_cast<unsigned long long*>(p);
}

}  // namespace oases::cuda
