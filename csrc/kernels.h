// Kernels of norm and activation: a CUDA launcher and, with the same name and arguments except the stream,
// its CPU version, which is fall-back and reference. Includes neither torch nor CUDA headers, so that both
// sides can include it. Pointers are on the launcher's device; tensors are contiguous and of the given dtype;
// float* is fp32 for any dtype. Launchers return before the work is done and throw std::runtime_error with
// CUDA's message if it cannot start.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace oases {

enum class DType { f32, f16, bf16 };

// ---- norm: fused epilogue after an all-reduce

enum class Norm { layer, rms };

// out = x + dropout(y + bias), h = norm(out) * weight + norm_bias, over rows of n numbers. Row r has the
// dropout mask of row offset + r of the whole batch (philox.h).
struct NormEpilogue {
  DType dtype;
  Norm norm;
  int64_t rows, n;
  double eps, p;
  int64_t seed, offset;
};
// bias, norm_bias, mean: may be null; mean is not written for rms.
struct NormForward {
  const void *y, *x, *bias, *weight, *norm_bias;  // [rows, n] twice, [n] three times
  void *out, *h;                                  // [rows, n]
  float *mean, *rstd;                             // [rows]
};
// grad_out, grad_h: null means zeros. grad_y: null if p is 0, where it equals grad_x. grad_bias and
// grad_norm_bias: null if not needed. partials: [blocks, sums, n], where sums is the number of the last three
// that are not null.
struct NormBackward {
  const void *grad_out, *grad_h, *out, *weight;  // out: from the forward pass
  const float *mean, *rstd;
  void *grad_y, *grad_x;
  float* partials;
  int64_t blocks;
  void *grad_weight, *grad_bias, *grad_norm_bias;
};

// ---- activation

enum class Gelu { tanh, erf };

namespace cpu {

void norm_forward(const NormEpilogue& epilogue, const NormForward& tensors);
// Number of partial sums of each parameter's gradient in the backward pass: `sums` at a time.
int64_t norm_backward_blocks(const NormEpilogue& epilogue, const NormBackward& tensors);
void norm_backward(const NormEpilogue& epilogue, const NormBackward& tensors);

// out = gelu(x + bias): x, out [rows, n], bias [n] or null.
void gelu(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* x, const void* bias, void* out);
// grad_bias may be null; partials [gelu_backward_blocks(...), n] may then be null.
int64_t gelu_backward_blocks(DType dtype, int64_t rows, int64_t n);
void gelu_backward(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* grad, const void* x,
                   const void* bias, void* grad_x, float* partials, void* grad_bias);
// out = silu(gate) * up, [rows, n]: x is gate and up is [rows, n], or up is null and x is [rows, 2 n], gate before up.
void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, const void* up, void* out);
// grad_up: null if up is.
void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, const void* up,
                     void* grad_x, void* grad_up);

}  // namespace cpu

namespace cuda {

// Compiler version and architectures of the kernels: "13.0" and "sm_80", "sm_90", ...
std::string nvcc_version();
std::vector<std::string> architectures();
// Throws where a driver cannot run what this toolkit compiled. Versions are CUDA's, such as 12080 for 12.8, and 0 for
// no driver; a driver runs kernels of all toolkits of its major version.
inline void check_driver(int driver, int toolkit) {
  if (driver / 1000 >= toolkit / 1000) return;
  const auto shown = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  const std::string has = driver ? "the GPU's driver is for CUDA " + shown(driver) : "there is no GPU driver";
  throw std::runtime_error(has + ", but the kernels of oases were compiled by the toolkit of CUDA " +
                           shown(toolkit) +
                           "; update the driver, or build oases again with an nvcc of CUDA " +
                           std::to_string((driver ? driver : toolkit) / 1000) + " (NVCC=its path)");
}
// Sets the current device for launchers: they are linked with their own CUDA runtime, which torch's choice
// does not reach. The first call checks the driver.
void set_device(int device);
// Keeps the stream busy for so long: a link's time, for the `sim` backend.
void occupy(int64_t nanoseconds, void* stream);

void norm_forward(const NormEpilogue& epilogue, const NormForward& tensors, void* stream);
int64_t norm_backward_blocks(const NormEpilogue& epilogue, const NormBackward& tensors);
void norm_backward(const NormEpilogue& epilogue, const NormBackward& tensors, void* stream);

void gelu(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* x, const void* bias, void* out,
          void* stream);
int64_t gelu_backward_blocks(DType dtype, int64_t rows, int64_t n);
void gelu_backward(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* grad, const void* x,
                   const void* bias, void* grad_x, float* partials, void* grad_bias, void* stream);
void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, const void* up, void* out, void* stream);
void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, const void* up,
                     void* grad_x, void* grad_up, void* stream);

}  // namespace cuda

}  // namespace oases
