// Sets of keys in a table that adds up over the ranks and from which the keys can be taken out again, one by
// one: an invertible Bloom lookup table. A key lies in one cell of each third of the table, and a cell keeps
// three int64 sums over the keys in it, [cells, 3]: their number, the keys and the checks of the keys. All
// sums wrap around. Cell (third, column) is numbered third * columns + column, like the cells of a sketch of
// three rows. CUDA launchers enqueue on `stream` and throw std::runtime_error with a CUDA error's text.
#pragma once

#include "hashing.h"

namespace oases {

// Keys are below this, so that the sums of 2^15 copies of a key do not wrap around and can be divided.
constexpr int64_t kKeyLimit = int64_t{1} << 48;

// The key of a cell that holds nothing but copies of one key; else -1.
OASES_HOST_DEVICE int64_t only_key(const int64_t* header, int64_t third, int64_t column, int64_t columns,
                                   int64_t seed) {
  const int64_t* cell = header + (third * columns + column) * 3;
  const int64_t count = cell[0], keys = cell[1];
  if (count <= 0 || keys < 0 || keys % count != 0) return -1;
  const int64_t key = keys / count;
  if (static_cast<uint64_t>(cell[2]) != static_cast<uint64_t>(count) * check_of(key, seed)) return -1;
  return column_of(hash_of(key, third, seed), columns) == column ? key : -1;
}

// What a step of values needs: keys are numbered in ascending order.
struct PeelGraph {
  int64_t keys, n;
  const int64_t* by_round;  // [keys]: the keys, in the order in which they were found
  const int64_t* owners;    // [keys]: the cell in which a key was found alone
  const int64_t* starts;    // [keys]: where the entries of this cell begin in `entries`
  const int64_t* ends;      // [keys]: and end
  const int64_t* entries;   // [3 * keys], sorted by cell: third * keys + key
};

namespace cuda {

// Adds keys [m] to header [3 * columns, 3]. *first_bad is lowered to the first whose key is not in [0,
// kKeyLimit); such keys are left out.
void peel_encode(const int64_t* keys, int64_t m, int64_t columns, int64_t seed, int64_t* header,
                 int64_t* first_bad, void* stream);

// Takes out every key that is alone in a cell of one third. For each, found_keys and found_rounds, at the
// number of this cell, become the key and `round`, and so does *last_round.
void peel_third(int64_t* header, int64_t columns, int64_t seed, int64_t third, int64_t round,
                int64_t* found_keys, int64_t* found_rounds, int64_t* last_round, void* stream);

// values [keys, n] of by_round[from, to): the owner's sum less the values of the other keys in it, all of
// which must have been found in earlier rounds. Differences are taken in fp64.
void peel_values(const float* sums, PeelGraph graph, int64_t from, int64_t to, float* values, void* stream);

}  // namespace cuda

namespace cpu {

void peel_encode(const int64_t* keys, int64_t m, int64_t columns, int64_t seed, int64_t* header,
                 int64_t* first_bad);
void peel_third(int64_t* header, int64_t columns, int64_t seed, int64_t third, int64_t round,
                int64_t* found_keys, int64_t* found_rounds, int64_t* last_round);
void peel_values(const float* sums, PeelGraph graph, int64_t from, int64_t to, float* values);

}  // namespace cpu
}  // namespace oases
