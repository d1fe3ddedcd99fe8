#include <algorithm>
#include <atomic>

#include "peel_kernels.h"
#include "scalars.h"

namespace oases::cpu {
namespace {

void add(int64_t& sum, uint64_t amount) {
  std::atomic_ref<int64_t>(sum).fetch_add(static_cast<int64_t>(amount), std::memory_order_relaxed);
}

void add_to_cell(int64_t* header, int64_t cell, int64_t count, int64_t key, int64_t seed) {
  const auto times = static_cast<uint64_t>(count);
  add(header[cell * 3], times);
  add(header[cell * 3 + 1], times * static_cast<uint64_t>(key));
  add(header[cell * 3 + 2], times * check_of(key, seed));
}

constexpr int64_t kPiece = 128;  // of a row, whose differences stay in the first cache

OASES_VECTORISED void take_out(double* rest, const float* values, int64_t width) {
  for (int64_t c = 0; c < width; ++c) rest[c] -= values[c];
}

}  // namespace

void peel_encode(const int64_t* keys, int64_t m, int64_t columns, int64_t seed, int64_t* header,
                 int64_t* first_bad) {
  const auto bad =
      std::find_if(keys, keys + m, [](int64_t key) { return key < 0 || key >= kKeyLimit; }) - keys;
  if (bad < m) {
    *first_bad = bad;
    return;
  }
  each_row(m, 3, [&](int64_t i) {
    for (int64_t third = 0; third < 3; ++third) {
      const int64_t column = column_of(hash_of(keys[i], third, seed), columns);
      add_to_cell(header, third * columns + column, 1, keys[i], seed);
    }
  });
}

void peel_third(int64_t* header, int64_t columns, int64_t seed, int64_t third, int64_t round,
                int64_t* found_keys, int64_t* found_rounds, int64_t* last_round) {
  // Cells of `third` are read and cleared by their own tasks alone; the other thirds are only added to.
  each_row(columns, 3, [&](int64_t column) {
    const int64_t key = only_key(header, third, column, columns, seed), cell = third * columns + column;
    if (key < 0) return;
    const int64_t count = header[cell * 3];
    std::fill_n(header + cell * 3, 3, 0);
    for (int64_t other = 0; other < 3; ++other) {
      if (other == third) continue;
      const int64_t place = other * columns + column_of(hash_of(key, other, seed), columns);
      add_to_cell(header, place, -count, key, seed);
    }
    found_keys[cell] = key;
    found_rounds[cell] = round;
    std::atomic_ref<int64_t>(*last_round).store(round, std::memory_order_relaxed);
  });
}

void peel_values(const float* sums, PeelGraph graph, int64_t from, int64_t to, float* values) {
  const int64_t n = graph.n;
  each_row(to - from, n, [&](int64_t i) {
    const int64_t key = graph.by_round[from + i];
    double rest[kPiece];
    for (int64_t first = 0; first < n; first += kPiece) {
      const int64_t width = std::min(n - first, kPiece);
      const float* sum = sums + graph.owners[key] * n + first;
      std::copy_n(sum, width, rest);
      for (int64_t entry = graph.starts[key]; entry < graph.ends[key]; ++entry) {
        const int64_t other = graph.entries[entry] % graph.keys;
        if (other != key) take_out(rest, values + other * n + first, width);
      }
      std::copy_n(rest, width, values + key * n + first);
    }
  });
}

}  // namespace oases::cpu
