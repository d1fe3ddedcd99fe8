// torch.library ops of quantised blocks (quantize_kernels.h), into memory that the caller gives.
#include <torch/library.h>

#include "dispatch.h"
#include "quantize_kernels.h"

namespace oases {
namespace {

using at::Tensor;

void check_floats(const char* op, const Tensor& x) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.is_contiguous(), op,
                    " of quantised numbers takes contiguous float32 tensors, got ", x.scalar_type(), " ",
                    x.sizes(), "; convert it");
}

void check_packed(const char* op, const Tensor& packed, const Tensor& x) {
  const int64_t bytes = packed_bytes(x.numel());
  TORCH_CHECK_VALUE(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.numel() >= bytes,
                    op, " of ", x.numel(), " numbers takes ", bytes, " contiguous bytes, got ",
                    packed.numel(), " of ", packed.scalar_type());
  TORCH_CHECK_VALUE(packed.device() == x.device(), op, ": the bytes are on ", packed.device(),
                    " but the numbers on ", x.device(), "; move one of them");
  TORCH_CHECK_VALUE(packed.is_cpu() || reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 4 == 0, op,
                    ": the bytes on ", packed.device(), " must begin at a multiple of 4");
}

void check_parts(const char* op, const Tensor& parts, const Tensor& x) {
  const int64_t bytes = packed_bytes(x.numel());
  TORCH_CHECK_VALUE(parts.scalar_type() == at::kByte && parts.is_contiguous() && parts.dim() == 2 &&
                        parts.size(1) >= bytes && parts.size(1) % 4 == 0 && parts.device() == x.device(),
                    op, ": parts of ", x.numel(), " numbers are contiguous rows of ", bytes,
                    " bytes or more on ", x.device(), ", got ", parts.sizes(), " of ", parts.scalar_type(),
                    " on ", parts.device());
}

void quantize(const Tensor& x, const std::optional<Tensor>& parts, int64_t skip, Tensor packed) {
  const char* op = "quantize";
  check_floats(op, x);
  check_packed(op, packed, x);
  if (parts) check_parts(op, *parts, x);
  OASES_LAUNCH(x, quantize_sum, x.const_data_ptr<float>(), parts ? parts->const_data_ptr<uint8_t>() : nullptr,
               parts ? parts->size(0) : 0, skip, parts ? parts->size(1) : 0, x.numel(),
               packed.mutable_data_ptr<uint8_t>());
}

void dequantize_sum(const Tensor& x, const Tensor& parts, int64_t skip, Tensor out) {
  const char* op = "dequantize_sum";
  check_floats(op, x);
  check_floats(op, out);
  check_parts(op, parts, x);
  TORCH_CHECK_VALUE(out.numel() == x.numel() && out.device() == x.device(), op, ": ", x.numel(),
                    " numbers on ", x.device(), " are summed into ", out.numel(), " on ", out.device());
  OASES_LAUNCH(x, sum_parts, x.const_data_ptr<float>(), parts.const_data_ptr<uint8_t>(), parts.size(0), skip,
               parts.size(1), x.numel(), out.mutable_data_ptr<float>());
}

void dequantize(const Tensor& packed, Tensor out) {
  const char* op = "dequantize";
  check_floats(op, out);
  check_packed(op, packed, out);
  OASES_LAUNCH(out, dequantize, packed.const_data_ptr<uint8_t>(), out.numel(), out.mutable_data_ptr<float>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  library.def("quantize(Tensor x, Tensor? parts, int skip, Tensor(a!) packed) -> ()");
  library.def("dequantize_sum(Tensor x, Tensor parts, int skip, Tensor(a!) out) -> ()");
  library.def("dequantize(Tensor packed, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("quantize", quantize);
  library.impl("dequantize_sum", dequantize_sum);
  library.impl("dequantize", dequantize);
}

TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("quantize", quantize);
  library.impl("dequantize_sum", dequantize_sum);
  library.impl("dequantize", dequantize);
}

}  // namespace oases
