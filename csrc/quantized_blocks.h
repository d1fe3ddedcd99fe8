// The ops of quantised blocks (quantize_ops.cpp) for the core, on the tensors' device and its current stream.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace oases::blocks {

template <typename Signature>
auto op_called(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// x [n], or the sum of it and of packed parts [count, bytes] but for part `skip`, -> packed.
inline void pack(const at::Tensor& x, const at::Tensor& packed,
                 const std::optional<at::Tensor>& parts = std::nullopt, int64_t skip = -1) {
  static const auto op =
      op_called<void(const at::Tensor&, const std::optional<at::Tensor>&, int64_t, at::Tensor)>(
          "oases::quantize");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(x, parts, skip, packed);
}

// The same sum -> out [n].
inline void sum(const at::Tensor& x, const at::Tensor& parts, int64_t skip, const at::Tensor& out) {
  static const auto op =
      op_called<void(const at::Tensor&, const at::Tensor&, int64_t, at::Tensor)>("oases::dequantize_sum");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(x, parts, skip, out);
}

// packed -> out [n].
inline void unpack(const at::Tensor& packed, const at::Tensor& out) {
  static const auto op = op_called<void(const at::Tensor&, at::Tensor)>("oases::dequantize");
  const at::AutoDispatchBelowADInplaceOrView below;
  op.call(packed, out);
}

}  // namespace oases::blocks
