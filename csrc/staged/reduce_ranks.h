// Sums and other reductions of the same numbers of several ranks, on the CPU.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace oases {

using ReduceType = c10d::ReduceOp::RedOpType;

// As torch.distributed calls it.
const char* reduction_name(ReduceType reduce);

// Raises ValueError where gloo, too, cannot reduce numbers of that type.
void check_reduction(const char* collective, at::ScalarType type, ReduceType reduce);

// out[i] = sources[0][i] + sources[1][i] + ..., in that order; of 16-bit numbers summed in fp32 and rounded once.
// `second`, or null: where the result goes as well. Either may be one of the sources.
void reduce_ranks(at::ScalarType type, ReduceType reduce, const std::byte* const* sources, int ranks,
                  int64_t count, std::byte* out, std::byte* second);

}  // namespace oases
