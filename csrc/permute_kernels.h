// Permutation of token rows by expert: a stable counting sort of slots by expert, and gathers. A
// slot is a (token, expert) pair, numbered token * k + j for the j-th of a token's k experts.
// Pointers are to dense row-major arrays. CUDA launchers enqueue on `stream` and throw
// std::runtime_error with the CUDA error's text.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace oases {

// Slots that one warp, or one task on the CPU, counts and places in order: few, for a warp takes 32 of them at a time,
// one after another, and a large GPU has room for thousands of warps.
constexpr int64_t kSlotsPerTile = 128;
inline int64_t tiles_of(int64_t slots) { return (slots + kSlotsPerTile - 1) / kSlotsPerTile; }

namespace cuda {

// counts [experts] of the ids [slots]. tile_offsets [experts, tiles]: slots of the same expert
// in earlier tiles. *first_bad is lowered to the first slot whose id is outside [0, experts);
// such slots are not counted.
void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad, void* stream);

// source [slots]: slots in order of expert, then slot. bases [experts + 1] is scratch; tile_offsets is
// overwritten. All ids must be in [0, experts).
void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source, void* stream);

// out [rows, row_bytes]: row source[i] / k of x.
void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes, void* out,
                 void* stream);

// inverse [slots]: i at source[i]. If source is not a permutation of the slots, some entry is -1.
void invert(const int64_t* source, int64_t slots, int64_t* inverse, void* stream);

// out [tokens, n]: fp32 sum over j, in order, of weights[token, j] times the row of the slot; null weights
// mean ones. A token with a slot without a row becomes NaN.
void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out, void* stream);

// Gradients of combine_rows: grad_rows [slots, n] and, unless rows and weights are null, grad_weights
// [slots]; entries not in source are left as they are. Rows of a source out of range become NaN.
void combine_rows_backward(const void* grad, const void* rows, const int64_t* source, const void* weights,
                           DType dtype, DType weights_dtype, int64_t slots, int64_t k, int64_t n,
                           void* grad_rows, void* grad_weights, void* stream);

}  // namespace cuda

namespace cpu {

void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad);
void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source);
void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes, void* out);
void invert(const int64_t* source, int64_t slots, int64_t* inverse);
void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out);
void combine_rows_backward(const void* grad, const void* rows, const int64_t* source, const void* weights,
                           DType dtype, DType weights_dtype, int64_t slots, int64_t k, int64_t n,
                           void* grad_rows, void* grad_weights);

}  // namespace cpu
}  // namespace oases
