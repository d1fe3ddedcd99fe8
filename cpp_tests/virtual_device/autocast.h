// Autocast of the virtual device, as CUDA's: products in the lower type, what needs the range in float32.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace virtual_device {

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDE)
}
#undef LOWER
#undef WIDE

}  // namespace virtual_device
