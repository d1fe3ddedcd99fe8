// Column- and row-parallel linears in chunks, so that the collective of one chunk is in flight while the
// matmul of the next is computed. Results are written in place into slices of one output. Differentiable; the
// entry points below are those of the torch.library ops in ops.cpp.
//
// Shapes: rows = all leading dimensions of the input, t = group size. With `sequence_parallel`, activations
// outside the pair of layers are sharded along dim -2 (the sequence) over t ranks, and the all-reduce becomes
// a reduce-scatter and an all-gather. Chunks are then along the batch or, if that has fewer than num_chunks
// entries, along the sequence: the same rows of every rank's shard.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

namespace oases {

// y = x W^T + b for this rank's output columns. x: [..., in], weight: [out/t, in], bias:
// [out/t] -> [..., out/t].
at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const std::string& group, int64_t num_chunks, bool sequence_parallel);
// grad: [..., out/t] -> gradients of x (summed over the group), weight and bias. weight_trains: else that of the weight
// is empty, and nothing is computed for it; what is sent is the same.
std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const std::string& group,
    int64_t num_chunks, bool sequence_parallel, bool weight_trains = true);

// y = sum over ranks of x W^T, + b once. x: [..., in/t], weight: [out, in/t], bias: [out] -> [..., out].
at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const std::string& group, int64_t num_chunks, bool sequence_parallel);
// grad: [..., out], equal on every rank (a sequence shard if sequence_parallel).
std::tuple<at::Tensor, at::Tensor, at::Tensor> row_linear_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const std::string& group,
    int64_t num_chunks, bool sequence_parallel, bool weight_trains = true);

// Differentiable versions, registered for Autograd: forward and backward redispatch to the four above.
at::Tensor column_linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, const std::string& group,
                                  int64_t num_chunks, bool sequence_parallel);
at::Tensor row_linear_autograd(const at::Tensor& x, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const std::string& group,
                               int64_t num_chunks, bool sequence_parallel);

}  // namespace oases
