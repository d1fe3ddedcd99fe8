// Dropout masks that need no storage: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
// as easy as 1, 2, 3", 2011), equal on the CPU and in CUDA. Four adjacent columns of a row use the four words
// of one call; its counter is the index of these four in the whole tensor, its key the seed.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace oases {

struct Words {
  uint32_t a, b, c, d;
};

OASES_HOST_DEVICE Words philox(uint64_t key, uint64_t counter) {
  Words x{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * x.a, second = uint64_t{0xCD9E8D57} * x.c;
    x = {static_cast<uint32_t>(second >> 32) ^ x.b ^ key_low, static_cast<uint32_t>(second),
         static_cast<uint32_t>(first >> 32) ^ x.d ^ key_high, static_cast<uint32_t>(first)};
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return x;
}

struct Dropout {
  uint64_t seed, first_row, fours;  // fours: groups of four columns in a row, the last possibly partial
  uint64_t threshold;               // a word below it keeps its element; 2^32 keeps all
  float scale;

  OASES_HOST_DEVICE bool active() const { return threshold != (uint64_t{1} << 32); }
  // The words of columns 4 * four ... 4 * four + 3.
  OASES_HOST_DEVICE Words words(uint64_t row, uint64_t four) const {
    return philox(seed, (first_row + row) * fours + four);
  }
  OASES_HOST_DEVICE float apply(uint32_t word, float value) const {
    return word < threshold ? value * scale : 0.0f;
  }
  // One column, if the number of columns is not a multiple of four.
  OASES_HOST_DEVICE float apply_at(uint64_t row, uint64_t column, float value) const {
    const Words w = words(row, column / 4);
    const uint32_t which = static_cast<uint32_t>(column % 4);
    return apply(which == 0 ? w.a : which == 1 ? w.b : which == 2 ? w.c : w.d, value);
  }
};

inline Dropout make_dropout(double p, int64_t seed, int64_t offset, int64_t n) {
  const double threshold = std::nearbyint((1.0 - p) * 4294967296.0);
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), static_cast<uint64_t>((n + 3) / 4),
          static_cast<uint64_t>(threshold), p < 1 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f};
}

}  // namespace oases
