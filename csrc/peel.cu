// The atomics here are on integers, whose sums do not depend on their order.
#include "peel_kernels.h"

#include "launch.h"

namespace oases::cuda {
namespace {

__device__ void add_to_cell(int64_t* header, int64_t cell, int64_t count, int64_t key, int64_t seed) {
  const auto times = static_cast<unsigned long long>(count);
  atomicAdd(as_unsigned(header + cell * 3), times);
  atomicAdd(as_unsigned(header + cell * 3 + 1), times * static_cast<unsigned long long>(key));
  atomicAdd(as_unsigned(header + cell * 3 + 2), times * static_cast<unsigned long long>(check_of(key, seed)));
}

__global__ void add_keys(const int64_t* keys, int64_t m, int64_t columns, int64_t seed, int64_t* header,
                         int64_t* first_bad) {
  for (int64_t i = first_item(); i < m; i += item_stride()) {
    const int64_t key = keys[i];
    if (key < 0 || key >= kKeyLimit) {
      atomicMin(as_unsigned(first_bad), static_cast<unsigned long long>(i));
      continue;
    }
    for (int64_t third = 0; third < 3; ++third) {
      add_to_cell(header, third * columns + column_of(hash_of(key, third, seed), columns), 1, key, seed);
    }
  }
}

// Cells of `third` are read and cleared by their own threads alone; the other thirds are only added to.
__global__ void take_third(int64_t* header, int64_t columns, int64_t seed, int64_t third, int64_t round,
                           int64_t* found_keys, int64_t* found_rounds, int64_t* last_round) {
  for (int64_t column = first_item(); column < columns; column += item_stride()) {
    const int64_t key = only_key(header, third, column, columns, seed), cell = third * columns + column;
    if (key < 0) continue;
    const int64_t count = header[cell * 3];
    for (int i = 0; i < 3; ++i) header[cell * 3 + i] = 0;
    for (int64_t other = 0; other < 3; ++other) {
      if (other == third) continue;
      add_to_cell(header, other * columns + column_of(hash_of(key, other, seed), columns), -count, key, seed);
    }
    found_keys[cell] = key;
    found_rounds[cell] = round;
    *last_round = round;
  }
}

__global__ void subtract_others(const float* sums, PeelGraph graph, int64_t from, int64_t to, float* values) {
  const int64_t n = graph.n, stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t i = from + static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < to; i += stride) {
    const int64_t key = graph.by_round[i];
    for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
      double value = sums[graph.owners[key] * n + c];
      for (int64_t entry = graph.starts[key]; entry < graph.ends[key]; ++entry) {
        const int64_t other = graph.entries[entry] % graph.keys;
        if (other != key) value -= values[other * n + c];
      }
      values[key * n + c] = static_cast<float>(value);
    }
  }
}

}  // namespace

void peel_encode(const int64_t* keys, int64_t m, int64_t columns, int64_t seed, int64_t* header,
                 int64_t* first_bad, void* stream) {
  launch("peel_encode", add_keys, blocks_for(m, kThreads), kThreads, 0, stream, keys, m, columns, seed,
         header, first_bad);
}

void peel_third(int64_t* header, int64_t columns, int64_t seed, int64_t third, int64_t round,
                int64_t* found_keys, int64_t* found_rounds, int64_t* last_round, void* stream) {
  launch("peel_third", take_third, blocks_for(columns, kThreads), kThreads, 0, stream, header, columns, seed,
         third, round, found_keys, found_rounds, last_round);
}

void peel_values(const float* sums, PeelGraph graph, int64_t from, int64_t to, float* values, void* stream) {
  const dim3 block = block_over(graph.n);
  launch("peel_values", subtract_others, blocks_for(to - from, block.y), block, 0, stream, sums, graph, from,
         to, values);
}

}  // namespace oases::cuda
