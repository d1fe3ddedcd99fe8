// torch.library ops of the chunked linears: schemas, kernels and, for tracing, shapes. Groups are passed by
// c10d name, which torch.compile supports.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "dispatch.h"
#include "linear.h"

namespace oases {
namespace {

using at::Tensor;

c10::SymInt group_size(const std::string& group) { return c10d::resolve_process_group(group)->getSize(); }

std::vector<c10::SymInt> output_sizes(const Tensor& x, const Tensor& weight) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return sizes;
}

Tensor column_linear_meta(const Tensor& x, const Tensor& weight, const std::optional<Tensor>&,
                          const std::string& group, int64_t, bool sequence_parallel) {
  auto sizes = output_sizes(x, weight);
  if (sequence_parallel) sizes[sizes.size() - 2] = sizes[sizes.size() - 2] * group_size(group);
  return x.new_empty_symint(sizes);
}

Tensor row_linear_meta(const Tensor& x, const Tensor& weight, const std::optional<Tensor>&,
                       const std::string& group, int64_t, bool sequence_parallel) {
  auto sizes = output_sizes(x, weight);
  if (sequence_parallel) sizes[sizes.size() - 2] = sizes[sizes.size() - 2] / group_size(group);
  return x.new_empty_symint(sizes);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_meta(const Tensor& grad, const Tensor& x,
                                                        const Tensor& weight, const std::string&, int64_t,
                                                        bool, bool weight_trains) {
  return {x.new_empty_symint(x.sym_sizes()),
          weight_trains ? weight.new_empty_symint(weight.sym_sizes()) : weight.new_empty({0}),
          grad.new_empty_symint({grad.sym_size(-1)})};
}

}  // namespace

TORCH_LIBRARY(oases, library) {
  library.def(
      "column_linear(Tensor x, Tensor weight, Tensor? bias, str group, int num_chunks, "
      "bool sequence_parallel) -> Tensor",
      kNotCaptured);
  library.def(
      "row_linear(Tensor x, Tensor weight, Tensor? bias, str group, int num_chunks, "
      "bool sequence_parallel) -> Tensor",
      kNotCaptured);
  library.def(
      "column_linear_backward(Tensor grad, Tensor x, Tensor weight, str group, int num_chunks, "
      "bool sequence_parallel, bool weight_trains=True) -> (Tensor, Tensor, Tensor)",
      kNotCaptured);
  library.def(
      "row_linear_backward(Tensor grad, Tensor x, Tensor weight, str group, int num_chunks, "
      "bool sequence_parallel, bool weight_trains=True) -> (Tensor, Tensor, Tensor)",
      kNotCaptured);
}

TORCH_LIBRARY_IMPL(oases, CompositeExplicitAutograd, library) {
  library.impl("column_linear", column_linear);
  library.impl("row_linear", row_linear);
  library.impl("column_linear_backward", column_linear_backward);
  library.impl("row_linear_backward", row_linear_backward);
}

TORCH_LIBRARY_IMPL(oases, Autograd, library) {
  library.impl("column_linear", column_linear_autograd);
  library.impl("row_linear", row_linear_autograd);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("column_linear", column_linear_meta);
  library.impl("row_linear", row_linear_meta);
  library.impl("column_linear_backward", linear_backward_meta);
  library.impl("row_linear_backward", linear_backward_meta);
}

}  // namespace oases
