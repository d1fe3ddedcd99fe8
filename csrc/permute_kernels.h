// Moving the rows of a mixture of experts: a stable counting sort of slots by expert and gathers over it.
// A slot is one pair of a token and one of its k experts, numbered token * k + j. Pointers are to dense
// row-major arrays. CUDA launchers enqueue on `stream` and throw std::runtime_error with a CUDA error's text.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace oases {

// Slots that one warp, or one task on CPU, counts and places in order.
constexpr int64_t kSlotsPerTile = 1024;
inline int64_t tiles_of(int64_t slots) { return (slots + kSlotsPerTile - 1) / kSlotsPerTile; }

namespace cuda {

// counts [experts] of the ids [slots]. tile_offsets [experts, tiles]: slots of the same expert in earlier
// tiles. *first_bad is lowered to the first slot whose id is not in [0, experts); such slots count nowhere.
void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad, void* stream);

// source [slots]: the slots in order of expert, then of slot. bases [experts + 1] is scratch, tile_offsets is
// used up. All ids must be in [0, experts).
void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source, void* stream);

// out [rows, row_bytes]: row source[i] / k of x.
void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes, void* out,
                 void* stream);

// inverse [slots]: i at source[i]. Where source is no permutation of the slots, some entry is -1.
void invert(const int64_t* source, int64_t slots, int64_t* inverse, void* stream);

// out [tokens, n]: the sum over j, in this order and in fp32, of weights[token, j] times the row of the slot;
// weights may be null, for ones. A token with a slot that has no row becomes NaN.
void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out, void* stream);

// The gradients of combine_rows: grad_rows [slots, n] and, where rows and weights are not null, grad_weights
// [slots], of which the entries that source does not name stay as they are. Rows of a source out of range
// become NaN.
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
