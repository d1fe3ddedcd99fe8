#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "permute_kernels.h"
#include "scalars.h"

namespace oases::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGrain = 1 << 15;  // minimum elements per task

// Calls `run` with a value of the rows' type and one of the weights'; weights are fp32 or of the rows' type.
template <typename Run>
void with_types(DType dtype, DType weights_dtype, const Run& run) {
  with_type(dtype, [&](auto element) {
    weights_dtype == DType::f32 ? run(element, float{}) : run(element, element);
  });
}

// Eight independent sums, because the compiler may not reorder a single one.
template <typename T>
float dot(const T* a, const T* b, int64_t n) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] += static_cast<float>(a[i + lane]) * static_cast<float>(b[i + lane]);
    }
  }
  for (; i < n; ++i) sums[i % 8] += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return std::accumulate(sums, sums + 8, 0.0f);
}

void lower(std::atomic<int64_t>& least, int64_t value) {
  int64_t seen = least.load(std::memory_order_relaxed);
  while (value < seen && !least.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad) {
  const int64_t tiles = tiles_of(slots);
  std::atomic<int64_t> bad{*first_bad};
  at::parallel_for(0, tiles, kGrain / kSlotsPerTile, [&](int64_t from, int64_t to) {
    std::vector<int64_t> mine(experts);
    for (int64_t tile = from; tile < to; ++tile) {
      std::fill(mine.begin(), mine.end(), 0);
      const int64_t end = std::min(slots, (tile + 1) * kSlotsPerTile);
      for (int64_t slot = tile * kSlotsPerTile; slot < end; ++slot) {
        if (ids[slot] >= 0 && ids[slot] < experts) {
          ++mine[ids[slot]];
        } else {
          lower(bad, slot);
        }
      }
      for (int64_t expert = 0; expert < experts; ++expert) tile_offsets[expert * tiles + tile] = mine[expert];
    }
  });
  *first_bad = bad;
  each_row(experts, tiles, [&](int64_t expert) {
    int64_t before = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t mine = std::exchange(tile_offsets[expert * tiles + tile], before);
      before += mine;
    }
    counts[expert] = before;
  });
}

void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source) {
  const int64_t tiles = tiles_of(slots);
  bases[0] = 0;
  for (int64_t expert = 0; expert < experts; ++expert) bases[expert + 1] = bases[expert] + counts[expert];
  each_row(tiles, kSlotsPerTile, [&](int64_t tile) {
    const int64_t end = std::min(slots, (tile + 1) * kSlotsPerTile);
    for (int64_t slot = tile * kSlotsPerTile; slot < end; ++slot) {
      source[bases[ids[slot]] + tile_offsets[ids[slot] * tiles + tile]++] = slot;
    }
  });
}

void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes,
                 void* out) {
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  each_row(rows, row_bytes, [&](int64_t row) {
    std::memcpy(to + row * row_bytes, from + source[row] / k * row_bytes, row_bytes);
  });
}

void invert(const int64_t* source, int64_t slots, int64_t* inverse) {
  std::fill_n(inverse, slots, -1);
  // Single-threaded: of rows that name one slot the first has it.
  for (int64_t i = slots - 1; i >= 0; --i) {
    if (source[i] >= 0 && source[i] < slots) inverse[source[i]] = i;
  }
}

void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out) {
  with_types(dtype, weights_dtype, [&](auto element, auto weight_element) {
    using T = decltype(element);
    using W = decltype(weight_element);
    at::parallel_for(0, tokens, std::max<int64_t>(1, kGrain / (k * n)), [&](int64_t begin, int64_t end) {
      std::vector<float> sums(n);
      for (int64_t token = begin; token < end; ++token) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t slot = token * k; slot < token * k + k; ++slot) {
          // The first row replaces a missing one, so that loads stay in bounds.
          const T* x = static_cast<const T*>(rows) + std::max<int64_t>(inverse[slot], 0) * n;
          const float given = weights ? static_cast<float>(static_cast<const W*>(weights)[slot]) : 1.0f;
          const float weight = inverse[slot] < 0 ? kNaN : given;
          for (int64_t c = 0; c < n; ++c) sums[c] += weight * static_cast<float>(x[c]);
        }
        T* y = static_cast<T*>(out) + token * n;
        for (int64_t c = 0; c < n; ++c) y[c] = static_cast<T>(sums[c]);
      }
    });
  });
}

void combine_rows_backward(const void* grad, const void* rows, const int64_t* source, const void* weights,
                           DType dtype, DType weights_dtype, int64_t slots, int64_t k, int64_t n,
                           void* grad_rows, void* grad_weights) {
  with_types(dtype, weights_dtype, [&](auto element, auto weight_element) {
    using T = decltype(element);
    using W = decltype(weight_element);
    each_row(slots, n, [&](int64_t row) {
      const int64_t slot = source[row];
      const bool valid = slot >= 0 && slot < slots;
      const float given = valid && weights ? static_cast<float>(static_cast<const W*>(weights)[slot]) : 1.0f;
      const float weight = valid ? given : kNaN;
      const T* g = static_cast<const T*>(grad) + (valid ? slot / k : 0) * n;
      T* scaled = static_cast<T*>(grad_rows) + row * n;
      for (int64_t c = 0; c < n; ++c) scaled[c] = static_cast<T>(weight * static_cast<float>(g[c]));
      if (!weights || !valid) return;
      const T* x = static_cast<const T*>(rows) + row * n;
      static_cast<W*>(grad_weights)[slot] = static_cast<W>(dot(g, x, n));
    });
  });
}

}  // namespace oases::cpu
