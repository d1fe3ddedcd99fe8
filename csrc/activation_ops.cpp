// torch.library ops of bias + GELU and SwiGLU: schemas, checks, shapes. Implemented in activation.cu and
// activation_cpu.cpp.
#include <torch/library.h>

#include "dispatch.h"

namespace oases {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Gelu gelu_kind(const std::string& approximate) {
  TORCH_CHECK(approximate == "tanh" || approximate == "none",
              "bias_gelu: approximate must be 'tanh' or 'none', got '", approximate, "'");
  return approximate == "tanh" ? Gelu::tanh : Gelu::erf;
}

struct Extent {
  int64_t rows, n;
};

Extent extent_of(const Tensor& x) {
  const int64_t n = x.size(-1);
  return {n == 0 ? 0 : x.numel() / n, n};
}

void check_bias(const OptionalTensor& bias, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, "bias_gelu: x must have at least 1 dimension, got 0");
  dtype_of("bias_gelu", x);
  if (!bias) return;
  check_alike("bias_gelu", "bias", *bias, x);
  check_sizes("bias_gelu", "bias", *bias, {x.sym_size(-1)});
}

Tensor gelu_forward(const Tensor& x, const OptionalTensor& bias, const std::string& approximate) {
  check_bias(bias, x);
  const Extent size = extent_of(x);
  const DType dtype = dtype_of("bias_gelu", x);
  const Gelu kind = gelu_kind(approximate);
  const OptionalTensor shift = contiguous(bias);
  const Tensor from = x.contiguous(), out = at::empty(x.sizes(), x.options());
  if (size.rows > 0)
    OASES_LAUNCH(x, gelu, dtype, kind, size.rows, size.n, from.data_ptr(), data_or_null(shift),
                 out.data_ptr());
  return out;
}

std::tuple<Tensor, Tensor> gelu_gradients(const Tensor& grad, const Tensor& x, const OptionalTensor& bias,
                                          const std::string& approximate) {
  check_bias(bias, x);
  const Extent size = extent_of(x);
  const DType dtype = dtype_of("bias_gelu", x);
  const Gelu kind = gelu_kind(approximate);
  const OptionalTensor shift = contiguous(bias);
  check_alike("bias_gelu", "grad", grad, x);
  check_sizes("bias_gelu", "grad", grad, x.sym_sizes());
  const Tensor from = x.contiguous(), grad_rows = grad.contiguous();
  const Tensor grad_x = at::empty(x.sizes(), x.options());
  const Tensor grad_bias = at::empty({shift ? size.n : 0}, x.options());
  if (size.rows == 0) {
    grad_bias.zero_();
    return {grad_x, grad_bias};
  }
  Tensor partials;
  if (shift) {
    const int64_t blocks = OASES_ASK(x, gelu_backward_blocks, dtype, size.rows, size.n);
    partials = at::empty({blocks, size.n}, x.options().dtype(at::kFloat));
  }
  OASES_LAUNCH(x, gelu_backward, dtype, kind, size.rows, size.n, grad_rows.data_ptr(), from.data_ptr(),
               data_or_null(shift), grad_x.data_ptr(), shift ? partials.data_ptr<float>() : nullptr,
               shift ? grad_bias.data_ptr() : nullptr);
  return {grad_x, grad_bias};
}

// Sizes of the result: x's, with n in place of 2 n where x holds gate and up.
std::vector<c10::SymInt> gated_sizes(const Tensor& x, const OptionalTensor& up) {
  auto sizes = x.sym_sizes().vec();
  if (!up) sizes.back() = sizes.back() / 2;
  return sizes;
}

void check_gated(const Tensor& x, const OptionalTensor& up) {
  dtype_of("swiglu", x);
  TORCH_CHECK(x.dim() >= 1, "swiglu: x must have at least 1 dimension, got 0");
  TORCH_CHECK(up || x.sym_size(-1) % 2 == 0,
              "swiglu: x must hold gate and up, so its last dimension must be even, got the shape ",
              x.sym_sizes());
  if (!up) return;
  check_alike("swiglu", "up", *up, x);
  check_sizes("swiglu", "up", *up, x.sym_sizes());
}

Tensor swiglu_forward(const Tensor& x, const OptionalTensor& up) {
  check_gated(x, up);
  const DType dtype = dtype_of("swiglu", x);
  const Tensor from = x.contiguous(), out = at::empty_symint(gated_sizes(x, up), x.options());
  const OptionalTensor second = contiguous(up);
  const Extent size = extent_of(out);
  if (size.rows > 0)
    OASES_LAUNCH(x, swiglu, dtype, size.rows, size.n, from.data_ptr(), data_or_null(second), out.data_ptr());
  return out;
}

// The gradient of up is [0] where x holds it.
std::tuple<Tensor, Tensor> swiglu_gradients_meta(const Tensor&, const Tensor& x, const OptionalTensor& up) {
  return {x.new_empty_symint(x.sym_sizes()), up ? x.new_empty_symint(x.sym_sizes()) : x.new_empty({0})};
}

std::tuple<Tensor, Tensor> swiglu_gradients(const Tensor& grad, const Tensor& x, const OptionalTensor& up) {
  check_gated(x, up);
  const DType dtype = dtype_of("swiglu", x);
  check_alike("swiglu", "grad", grad, x);
  check_sizes("swiglu", "grad", grad, gated_sizes(x, up));
  const Tensor from = x.contiguous(), grad_rows = grad.contiguous();
  const OptionalTensor second = contiguous(up);
  const auto [grad_x, grad_up] = swiglu_gradients_meta(grad, x, up);
  const Extent size = extent_of(grad);
  if (size.rows > 0)
    OASES_LAUNCH(x, swiglu_backward, dtype, size.rows, size.n, grad_rows.data_ptr(), from.data_ptr(),
                 data_or_null(second), grad_x.data_ptr(), up ? grad_up.data_ptr() : nullptr);
  return {grad_x, grad_up};
}

Tensor gelu_meta(const Tensor& x, const OptionalTensor& bias, const std::string&) {
  check_bias(bias, x);
  return x.new_empty_symint(x.sym_sizes());
}

std::tuple<Tensor, Tensor> gelu_gradients_meta(const Tensor&, const Tensor& x, const OptionalTensor& bias,
                                               const std::string&) {
  return {x.new_empty_symint(x.sym_sizes()), bias ? x.new_empty_symint({x.sym_size(-1)}) : x.new_empty({0})};
}

Tensor swiglu_meta(const Tensor& x, const OptionalTensor& up) {
  check_gated(x, up);
  return x.new_empty_symint(gated_sizes(x, up));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  library.def("bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor");
  library.def(
      "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, str approximate) -> "
      "(Tensor grad_x, Tensor grad_bias)");
  library.def("swiglu(Tensor x, Tensor? up=None) -> Tensor");
  library.def("swiglu_backward(Tensor grad, Tensor x, Tensor? up=None) -> (Tensor grad_x, Tensor grad_up)");
}

// Without CUDA kernels, this gives CUDA tensors a readable error instead of the dispatcher's.
TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("bias_gelu", gelu_forward);
  library.impl("bias_gelu_backward", gelu_gradients);
  library.impl("swiglu", swiglu_forward);
  library.impl("swiglu_backward", swiglu_gradients);
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("bias_gelu", gelu_forward);
  library.impl("bias_gelu_backward", gelu_gradients);
  library.impl("swiglu", swiglu_forward);
  library.impl("swiglu_backward", swiglu_gradients);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("bias_gelu", gelu_meta);
  library.impl("bias_gelu_backward", gelu_gradients_meta);
  library.impl("swiglu", swiglu_meta);
  library.impl("swiglu_backward", swiglu_gradients_meta);
}

}  // namespace oases
