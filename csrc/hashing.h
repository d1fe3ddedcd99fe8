// Hash functions of the sketches, equal on host and device and computed when needed, so that no table grows
// with the number of parameters.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace oases {

// Finaliser of splitmix64: a bijection in which every input bit affects every output bit.
OASES_HOST_DEVICE uint64_t mix(uint64_t word) {
  word += 0x9e3779b97f4a7c15ULL;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
  return word ^ (word >> 31);
}

// One hash function for every pair of seed and row.
OASES_HOST_DEVICE uint64_t hash_of(int64_t key, int64_t row, int64_t seed) {
  const uint64_t salt = mix(static_cast<uint64_t>(seed) + mix(static_cast<uint64_t>(row)));
  return mix(static_cast<uint64_t>(key) ^ salt);
}

// The upper bits of a hash, scaled to [0, columns).
OASES_HOST_DEVICE int64_t column_of(uint64_t hash, int64_t columns) {
  return static_cast<int64_t>((static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(columns)) >> 64);
}

// The lowest bit of a hash as a sign, independent of the column, which uses the upper bits.
OASES_HOST_DEVICE float sign_of(uint64_t hash) { return hash & 1 ? -1.0f : 1.0f; }

// Fingerprint that distinguishes a cell with one key from a cell with several. Row -1
// is not a row of a sketch.
OASES_HOST_DEVICE uint64_t check_of(int64_t key, int64_t seed) { return hash_of(key, -1, seed); }

}  // namespace oases
