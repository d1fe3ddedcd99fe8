// Every step is deterministic: a warp places the slots of its tile in order, and there are no float atomics.
#include "permute_kernels.h"

#include <limits>

#include "launch.h"

namespace oases::cuda {
namespace {

// Counters of one tile: 48 KiB of shared memory or, for more experts, the tile's column of the matrix in
// global memory, which no other warp accesses.
constexpr int64_t kSharedExperts = 6144;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int64_t counter_bytes(int64_t experts) {
  return experts <= kSharedExperts ? experts * static_cast<int64_t>(sizeof(int64_t)) : 0;
}

struct Counters {
  int64_t* first;
  int64_t stride;
  __device__ Counters(int64_t* matrix, int64_t experts, int64_t tiles)
      : first(experts <= kSharedExperts ? shared_memory<int64_t>() : matrix + blockIdx.x),
        stride(experts <= kSharedExperts ? 1 : tiles) {}
  __device__ int64_t& operator[](int64_t expert) const { return first[expert * stride]; }
};

// One warp per block and tile.
__global__ void count_tiles(const int64_t* ids, int64_t slots, int64_t experts, int64_t tiles,
                            int64_t* matrix, int64_t* first_bad) {
  const int lane = threadIdx.x;
  const Counters counters(matrix, experts, tiles);
  for (int64_t expert = lane; expert < experts; expert += kWarp) counters[expert] = 0;
  __syncwarp();
  const int64_t begin = blockIdx.x * kSlotsPerTile, end = min(slots, begin + kSlotsPerTile);
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t slot = first + lane;
    const int64_t id = slot < end ? ids[slot] : -1;
    const bool valid = id >= 0 && id < experts;
    if (slot < end && !valid) atomicMin(as_unsigned(first_bad), static_cast<unsigned long long>(slot));
    const unsigned peers = __match_any_sync(kAllLanes, static_cast<long long>(id));
    if (valid && lane == __ffs(peers) - 1) counters[id] += __popc(peers);
    __syncwarp();
  }
  for (int64_t expert = lane; expert < experts; expert += kWarp) {
    matrix[expert * tiles + blockIdx.x] = counters[expert];
  }
}

// One warp per row of the matrix: exclusive prefix sums along the row, and the total.
__global__ void scan_rows(int64_t rows, int64_t columns, int64_t* matrix, int64_t* totals) {
  const int lane = threadIdx.x % kWarp;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (row >= rows) return;
  int64_t before = 0;
  for (int64_t first = 0; first < columns; first += kWarp) {
    const int64_t column = first + lane;
    const int64_t mine = column < columns ? matrix[row * columns + column] : 0;
    const int64_t up_to = sum_up_to_lane(mine, lane);
    if (column < columns) matrix[row * columns + column] = before + up_to - mine;
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  if (lane == 0) totals[row] = before;
}

void scan(int64_t rows, int64_t columns, int64_t* matrix, int64_t* totals, void* stream) {
  const int64_t warps = kThreads / kWarp;
  launch("scan_rows", scan_rows, static_cast<unsigned>((rows + warps - 1) / warps), kThreads, 0, stream, rows,
         columns, matrix, totals);
}

// One warp per block and tile. Lanes of one expert are numbered from the lowest, so slots keep their order.
__global__ void place_tiles(const int64_t* ids, int64_t slots, int64_t experts, int64_t tiles,
                            const int64_t* bases, int64_t* matrix, int64_t* source) {
  const int lane = threadIdx.x;
  const Counters next(matrix, experts, tiles);
  for (int64_t expert = lane; expert < experts; expert += kWarp) {
    next[expert] = matrix[expert * tiles + blockIdx.x] + bases[expert];
  }
  __syncwarp();
  const int64_t begin = blockIdx.x * kSlotsPerTile, end = min(slots, begin + kSlotsPerTile);
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t slot = first + lane;
    const bool valid = slot < end;
    const int64_t id = valid ? ids[slot] : -1;
    const unsigned peers = __match_any_sync(kAllLanes, static_cast<long long>(id));
    const int before = __popc(peers & ((1u << lane) - 1));
    const int64_t position = valid ? next[id] + before : 0;
    __syncwarp();
    if (valid && before == 0) next[id] += __popc(peers);
    __syncwarp();
    if (valid) source[position] = slot;
  }
}

template <typename Unit>
__global__ void gather(const Unit* x, const int64_t* source, int64_t k, int64_t rows, int64_t units,
                       Unit* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    const Unit* from = x + source[row] / k * units;
    for (int64_t u = threadIdx.x; u < units; u += blockDim.x) out[row * units + u] = from[u];
  }
}

__global__ void invert_source(const int64_t* source, int64_t slots, int64_t* inverse) {
  for (int64_t i = first_item(); i < slots; i += item_stride()) {
    // Of rows that name one slot the first has it, whichever comes first; -1 is the largest of this type.
    if (source[i] >= 0 && source[i] < slots)
      atomicMin(as_unsigned(inverse + source[i]), static_cast<unsigned long long>(i));
  }
}

template <typename T, typename W, int V>
__global__ void combine(const Pack<T, V>* rows, const int64_t* inverse, const W* weights, int64_t tokens,
                        int64_t k, int64_t packs, Pack<T, V>* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; token < tokens;
       token += stride) {
    for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      float sums[V] = {};
      for (int64_t slot = token * k; slot < token * k + k; ++slot) {
        const int64_t row = inverse[slot];
        // The first row replaces a missing one, so that loads stay in bounds.
        const float weight = row < 0 ? kNaN : weights ? to_float(weights[slot]) : 1.0f;
        const Pack<T, V> x = rows[(row < 0 ? 0 : row) * packs + p];
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] += weight * x[v];
      }
      Pack<T, V> sum;
#pragma unroll
      for (int v = 0; v < V; ++v) sum.set(v, sums[v]);
      out[token * packs + p] = sum;
    }
  }
}

// One warp per row.
template <typename T, typename W, int V>
__global__ void combine_backward(const Pack<T, V>* grad, const Pack<T, V>* rows, const int64_t* source,
                                 const W* weights, int64_t slots, int64_t k, int64_t packs,
                                 Pack<T, V>* grad_rows, W* grad_weights) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t row = first_item() / kWarp; row < slots; row += item_stride() / kWarp) {
    const int64_t slot = source[row];
    const bool valid = slot >= 0 && slot < slots;
    const float weight = !valid ? kNaN : weights ? to_float(weights[slot]) : 1.0f;
    const int64_t token = valid ? slot / k : 0;
    float dot = 0;
    for (int64_t p = lane; p < packs; p += kWarp) {
      const Pack<T, V> g = grad[token * packs + p];
      Pack<T, V> scaled;
#pragma unroll
      for (int v = 0; v < V; ++v) scaled.set(v, weight * g[v]);
      grad_rows[row * packs + p] = scaled;
      if (weights) {
        const Pack<T, V> x = rows[row * packs + p];
#pragma unroll
        for (int v = 0; v < V; ++v) dot += g[v] * x[v];
      }
    }
    for (int step = kWarp / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kAllLanes, dot, step);
    if (weights && valid && lane == 0) grad_weights[slot] = from_float<W>(dot);
  }
}

template <typename Unit>
void gather_units(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes, void* out,
                  void* stream) {
  const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  const dim3 block = block_over(units);
  launch("gather_rows", gather<Unit>, blocks_for(rows, block.y), block, 0, stream,
         static_cast<const Unit*>(x), source, k, rows, units, static_cast<Unit*>(out));
}

// Calls `run` with a value of the rows' type and one of the weights'; weights are fp32 or of the rows' type.
template <typename Run>
void with_types(DType dtype, DType weights_dtype, const Run& run) {
  with_type(dtype, [&](auto element) {
    weights_dtype == DType::f32 ? run(element, float{}) : run(element, element);
  });
}

}  // namespace

void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad, void* stream) {
  const int64_t tiles = tiles_of(slots);
  launch("count_experts", count_tiles, static_cast<unsigned>(tiles), kWarp, counter_bytes(experts), stream,
         ids, slots, experts, tiles, tile_offsets, first_bad);
  scan(experts, tiles, tile_offsets, counts, stream);
}

void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source, void* stream) {
  const int64_t tiles = tiles_of(slots);
  check(cudaMemcpyAsync(bases, counts, experts * sizeof(int64_t), cudaMemcpyDeviceToDevice,
                        static_cast<cudaStream_t>(stream)),
        "place_slots");
  scan(1, experts, bases, bases + experts, stream);
  launch("place_slots", place_tiles, static_cast<unsigned>(tiles), kWarp, counter_bytes(experts), stream, ids,
         slots, experts, tiles, static_cast<const int64_t*>(bases), tile_offsets, source);
}

void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes, void* out,
                 void* stream) {
  if (row_bytes % 16 == 0 && aligned({x, out})) {
    gather_units<uint4>(x, source, k, rows, row_bytes, out, stream);
  } else {
    gather_units<uint16_t>(x, source, k, rows, row_bytes, out, stream);
  }
}

void invert(const int64_t* source, int64_t slots, int64_t* inverse, void* stream) {
  check(cudaMemsetAsync(inverse, 0xff, slots * sizeof(int64_t), static_cast<cudaStream_t>(stream)), "invert");
  launch("invert", invert_source, blocks_for(slots, kThreads), kThreads, 0, stream, source, slots, inverse);
}

void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out, void* stream) {
  with_types(dtype, weights_dtype, [&](auto element, auto weight) {
    using T = decltype(element);
    using W = decltype(weight);
    const auto run = [&](auto pack) {
      using P = decltype(pack);
      constexpr int V = sizeof(P) / sizeof(T);
      const dim3 block = block_over(n / V);
      launch("combine_rows", combine<T, W, V>, blocks_for(tokens, block.y), block, 0, stream,
             static_cast<const P*>(rows), inverse, static_cast<const W*>(weights), tokens, k, n / V,
             static_cast<P*>(out));
    };
    n % kWide<T> == 0 && aligned({rows, out}) ? run(Pack<T, kWide<T>>()) : run(Pack<T, 1>());
  });
}

void combine_rows_backward(const void* grad, const void* rows, const int64_t* source, const void* weights,
                           DType dtype, DType weights_dtype, int64_t slots, int64_t k, int64_t n,
                           void* grad_rows, void* grad_weights, void* stream) {
  with_types(dtype, weights_dtype, [&](auto element, auto weight) {
    using T = decltype(element);
    using W = decltype(weight);
    const auto run = [&](auto pack) {
      using P = decltype(pack);
      constexpr int V = sizeof(P) / sizeof(T);
      launch("combine_rows_backward", combine_backward<T, W, V>, blocks_for(slots, kThreads / kWarp),
             kThreads, 0, stream, static_cast<const P*>(grad), static_cast<const P*>(rows), source,
             static_cast<const W*>(weights), slots, k, n / V, static_cast<P*>(grad_rows),
             static_cast<W*>(grad_weights));
    };
    n % kWide<T> == 0 && aligned({grad, rows, grad_rows}) ? run(Pack<T, kWide<T>>()) : run(Pack<T, 1>());
  });
}

}  // namespace oases::cuda
