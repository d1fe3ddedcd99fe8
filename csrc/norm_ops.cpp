// torch.library ops of the norm epilogue: schemas, checks, shapes. Implemented in norm.cu and norm_cpu.cpp.
#include <torch/library.h>

#include <cmath>

#include "dispatch.h"

namespace oases {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "bias_dropout_residual_norm";

Norm norm_of(const std::string& kind) {
  TORCH_CHECK(kind == "layer" || kind == "rms", kOp, ": kind must be 'layer' or 'rms', got '", kind, "'");
  return kind == "layer" ? Norm::layer : Norm::rms;
}

void check_options(const Tensor& x, double eps, double p, int64_t offset) {
  dtype_of(kOp, x);
  TORCH_CHECK(x.dim() >= 1, kOp, ": x must have at least 1 dimension, got 0");
  TORCH_CHECK(p >= 0 && p <= 1, kOp, ": p must lie in [0, 1], got ", p);
  TORCH_CHECK(offset >= 0, kOp, ": offset must not be negative, got ", offset);
  TORCH_CHECK(eps >= 0 && std::isfinite(eps), kOp, ": eps must be finite and not negative, got ", eps);
}

NormEpilogue epilogue_of(const Tensor& x, Norm norm, double eps, double p, int64_t seed, int64_t offset) {
  const int64_t n = x.size(-1), rows = n == 0 ? 0 : x.numel() / n;
  return {dtype_of(kOp, x), norm, rows, n, eps, p, seed, offset};
}

void check_like_x(const char* name, const Tensor& other, const Tensor& x) {
  check_alike(kOp, name, other, x);
  check_sizes(kOp, name, other, x.sym_sizes());
}

void check_parameter(const char* name, const OptionalTensor& parameter, const Tensor& x) {
  if (!parameter) return;
  check_alike(kOp, name, *parameter, x);
  check_sizes(kOp, name, *parameter, {x.sym_size(-1)});
}

void check_forward(const Tensor& y, const Tensor& x, const OptionalTensor& bias, const Tensor& weight,
                   const OptionalTensor& norm_bias, double p, int64_t offset, double eps) {
  check_options(x, eps, p, offset);
  check_like_x("y", y, x);
  check_parameter("bias", bias, x);
  check_parameter("weight", weight, x);
  check_parameter("norm_bias", norm_bias, x);
}

OptionalTensor contiguous(const OptionalTensor& x) {
  return x ? OptionalTensor(x->contiguous()) : std::nullopt;
}

// One number per row; empty if the norm does not have it.
Tensor statistic(const Tensor& x, bool wanted) {
  auto sizes = x.sym_sizes().vec();
  if (wanted)
    sizes.pop_back();
  else
    sizes = {0};
  return at::empty_symint(sizes, x.options().dtype(at::kFloat));
}

Forward forward(const Tensor& y, const Tensor& x, const OptionalTensor& bias, const Tensor& weight,
                const OptionalTensor& norm_bias, double p, int64_t seed, int64_t offset,
                const std::string& kind, double eps) {
  check_forward(y, x, bias, weight, norm_bias, p, offset, eps);
  const NormEpilogue epilogue = epilogue_of(x, norm_of(kind), eps, p, seed, offset);
  const Tensor y_rows = y.contiguous(), x_rows = x.contiguous(), scale = weight.contiguous();
  const OptionalTensor shift = contiguous(bias), norm_shift = contiguous(norm_bias);
  const Tensor out = at::empty(x.sizes(), x.options()), h = at::empty(x.sizes(), x.options());
  const Tensor mean = statistic(x, epilogue.norm == Norm::layer), rstd = statistic(x, true);
  if (epilogue.rows > 0) {
    const NormForward tensors{y_rows.data_ptr(), x_rows.data_ptr(),        data_or_null(shift),
                              scale.data_ptr(),  data_or_null(norm_shift), out.data_ptr(),
                              h.data_ptr(),      mean.data_ptr<float>(),   rstd.data_ptr<float>()};
    OASES_LAUNCH(x, norm_forward, epilogue, tensors);
  } else {
    mean.zero_();
    rstd.zero_();
  }
  return {out, h, mean, rstd};
}

Forward forward_meta(const Tensor& y, const Tensor& x, const OptionalTensor& bias, const Tensor& weight,
                     const OptionalTensor& norm_bias, double p, int64_t, int64_t offset,
                     const std::string& kind, double eps) {
  check_forward(y, x, bias, weight, norm_bias, p, offset, eps);
  return {x.new_empty_symint(x.sym_sizes()), x.new_empty_symint(x.sym_sizes()),
          statistic(x, norm_of(kind) == Norm::layer), statistic(x, true)};
}

// Shapes of the backward's results: [0] for those not needed.
Backward gradients(const Tensor& out, const Tensor& weight, bool has_bias, bool has_norm_bias, double p) {
  const auto like = [](const Tensor& x, bool wanted) {
    return wanted ? x.new_empty_symint(x.sym_sizes()) : x.new_empty({0});
  };
  return {like(out, p > 0), like(out, true), like(weight, has_bias), like(weight, true),
          like(weight, has_norm_bias)};
}

Backward backward(const OptionalTensor& grad_out, const OptionalTensor& grad_h, const Tensor& out,
                  const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool has_bias,
                  bool has_norm_bias, double p, int64_t seed, int64_t offset, const std::string& kind) {
  check_options(out, 0, p, offset);
  const NormEpilogue epilogue = epilogue_of(out, norm_of(kind), 0, p, seed, offset);
  if (grad_out) check_like_x("grad_out", *grad_out, out);
  if (grad_h) check_like_x("grad_h", *grad_h, out);
  check_parameter("weight", weight, out);
  TORCH_CHECK(out.is_contiguous() && mean.is_contiguous() && rstd.is_contiguous(), kOp,
              ": out, mean and rstd must be as the forward returned them");
  const auto [grad_y, grad_x, grad_bias, grad_weight, grad_norm_bias] =
      gradients(out, weight, has_bias, has_norm_bias, p);
  if (epilogue.rows == 0) {
    for (const Tensor& sum : {grad_bias, grad_weight, grad_norm_bias}) sum.zero_();
    return {grad_y, grad_x, grad_bias, grad_weight, grad_norm_bias};
  }
  const OptionalTensor past = contiguous(grad_out), through = contiguous(grad_h);
  const Tensor scale = weight.contiguous();
  NormBackward tensors{data_or_null(past),
                       data_or_null(through),
                       out.data_ptr(),
                       scale.data_ptr(),
                       mean.data_ptr<float>(),
                       rstd.data_ptr<float>(),
                       p > 0 ? grad_y.data_ptr() : nullptr,
                       grad_x.data_ptr(),
                       nullptr,
                       0,
                       grad_weight.data_ptr(),
                       has_bias ? grad_bias.data_ptr() : nullptr,
                       has_norm_bias ? grad_norm_bias.data_ptr() : nullptr};
  tensors.blocks = OASES_ASK(out, norm_backward_blocks, epilogue, tensors);
  const Tensor partials =
      at::empty({tensors.blocks, 1 + has_bias + has_norm_bias, epilogue.n}, rstd.options());
  tensors.partials = partials.data_ptr<float>();
  OASES_LAUNCH(out, norm_backward, epilogue, tensors);
  return {grad_y, grad_x, grad_bias, grad_weight, grad_norm_bias};
}

Backward backward_meta(const OptionalTensor&, const OptionalTensor&, const Tensor& out, const Tensor& weight,
                       const Tensor&, const Tensor&, bool has_bias, bool has_norm_bias, double p, int64_t,
                       int64_t, const std::string&) {
  return gradients(out, weight, has_bias, has_norm_bias, p);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  library.def(
      "bias_dropout_residual_norm(Tensor y, Tensor x, Tensor? bias, Tensor weight, Tensor? norm_bias, float "
      "p, "
      "int seed, int offset, str kind, float eps) -> (Tensor out, Tensor h, Tensor mean, Tensor rstd)");
  library.def(
      "bias_dropout_residual_norm_backward(Tensor? grad_out, Tensor? grad_h, Tensor out, Tensor weight, "
      "Tensor mean, Tensor rstd, bool has_bias, bool has_norm_bias, float p, int seed, int offset, str kind) "
      "-> "
      "(Tensor grad_y, Tensor grad_x, Tensor grad_bias, Tensor grad_weight, Tensor grad_norm_bias)");
}

// Without CUDA kernels, this gives CUDA tensors a readable error instead of the dispatcher's.
TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("bias_dropout_residual_norm", forward);
  library.impl("bias_dropout_residual_norm_backward", backward);
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("bias_dropout_residual_norm", forward);
  library.impl("bias_dropout_residual_norm_backward", backward);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("bias_dropout_residual_norm", forward_meta);
  library.impl("bias_dropout_residual_norm_backward", backward_meta);
}

}  // namespace oases
