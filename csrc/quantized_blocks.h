// The ops of quantised blocks (quantize_ops.cpp) for the core, on the tensors' device and its current stream.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

#include "quantize_kernels.h"

namespace oases::blocks {

template <typename Signature>
auto op_called(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// x [n], or the sum of it and of packed parts [count, bytes] but for part `skip`, -> packed. first: index of x[0] in the
// whole tensor.
inline void pack(const Quantization& how, const at::Tensor& x, const at::Tensor& packed, int64_t first,
                 const std::optional<at::Tensor>& parts = std::nullopt, int64_t skip = -1) {
  static const auto op =
      op_called<void(const at::Tensor&, const std::string&, int64_t, const std::optional<at::Tensor>&,
                     int64_t, int64_t, at::Tensor)>("oases::quantize");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(x, name_of(how), static_cast<int64_t>(how.seed), parts, skip, first, packed);
}

// The same sum -> out [n].
inline void sum(const Quantization& how, const at::Tensor& x, const at::Tensor& parts, int64_t skip,
                const at::Tensor& out) {
  static const auto op =
      op_called<void(const at::Tensor&, const at::Tensor&, const std::string&, int64_t, at::Tensor)>(
          "oases::dequantize_sum");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(x, parts, name_of(how), skip, out);
}

// packed -> out [n].
inline void unpack(const Quantization& how, const at::Tensor& packed, const at::Tensor& out) {
  static const auto op =
      op_called<void(const at::Tensor&, const std::string&, at::Tensor)>("oases::dequantize");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(packed, name_of(how), out);
}

}  // namespace oases::blocks
