// From a tensor to the kernels of kernels.h: dtypes, devices, streams, and checks shared by the ops. Needs no
// CUDA header; without OASES_WITH_CUDA, CUDA tensors are rejected with a message.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace oases {

inline DType dtype_of(const char* op, const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    default:
      TORCH_CHECK(false, op, ": takes float32, float16 and bfloat16, got ", x.scalar_type());
  }
}

// Throws unless `other`, called `name` in the message, has the dtype and device of `x`.
inline void check_alike(const char* op, const char* name, const at::Tensor& other, const at::Tensor& x) {
  TORCH_CHECK(other.scalar_type() == x.scalar_type(), op, ": ", name, " is ", other.scalar_type(),
              " but x is ", x.scalar_type(), "; convert one of them");
  TORCH_CHECK(other.device() == x.device(), op, ": ", name, " is on ", other.device(), " but x is on ",
              x.device(), "; move one of them");
}

// Symbolic, so that tracing rejects what running would.
inline void check_sizes(const char* op, const char* name, const at::Tensor& x, c10::SymIntArrayRef sizes) {
  TORCH_CHECK(x.sym_sizes() == sizes, op, ": ", name, " must have the shape ", sizes, ", got ",
              x.sym_sizes());
}

inline std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& x) {
  return x ? std::optional(x->contiguous()) : std::nullopt;
}

// Ops that start collectives or wait for the device: inductor's CUDA graphs leave them out.
inline const std::vector<at::Tag> kNotCaptured{at::Tag::cudagraph_unsafe};

// Memory of an optional tensor, or null.
inline void* data_or_null(const std::optional<at::Tensor>& x) { return x ? x->data_ptr() : nullptr; }

#ifdef OASES_WITH_CUDA
// Device guard for torch and for the CUDA runtime that the kernels are linked with.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& x) : guard_(x.device()) {
    cuda::set_device(x.device().index());
    stream_ = c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).native_handle();
  }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_;
};

// Calls the launcher for the device of `x`: OASES_LAUNCH(x, gelu, dtype, ...) is cuda::gelu or cpu::gelu.
#define OASES_LAUNCH(x, function, ...)          \
  do {                                          \
    if ((x).is_cuda()) {                        \
      const ::oases::OnDevice on(x);            \
      cuda::function(__VA_ARGS__, on.stream()); \
    } else {                                    \
      cpu::function(__VA_ARGS__);               \
    }                                           \
  } while (false)
// The same for functions that compute a size and take no stream.
#define OASES_ASK(x, function, ...)                        \
  [&] {                                                    \
    if (!(x).is_cuda()) return cpu::function(__VA_ARGS__); \
    const ::oases::OnDevice on(x);                         \
    return cuda::function(__VA_ARGS__);                    \
  }()
#else
inline void refuse_cuda(const char* function, const at::Tensor& x) {
  TORCH_CHECK(x.is_cpu(), function, ": the tensors are on ", x.device(),
              ", but this build of oases has no CUDA kernels; install the CUDA toolkit (nvcc) and rebuild");
}
#define OASES_LAUNCH(x, function, ...)  \
  do {                                  \
    ::oases::refuse_cuda(#function, x); \
    cpu::function(__VA_ARGS__);         \
  } while (false)
#define OASES_ASK(x, function, ...) (::oases::refuse_cuda(#function, x), cpu::function(__VA_ARGS__))
#endif

}  // namespace oases
