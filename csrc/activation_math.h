// Activations and their derivatives for one number, on the CPU and in CUDA.
#pragma once

#include <cmath>

#include "host_device.h"
#include "kernels.h"

namespace oases {

// gelu(x) = x Phi(x), Phi exact (erf) or by its tanh approximation.
OASES_HOST_DEVICE float gelu_tanh_argument(float x) { return 0.7978845608f * (x + 0.044715f * x * x * x); }

OASES_HOST_DEVICE float gelu_of(Gelu kind, float x) {
  const float twice_phi = kind == Gelu::tanh ? tanhf(gelu_tanh_argument(x)) : erff(x * 0.7071067812f);
  return 0.5f * x * (1.0f + twice_phi);
}

OASES_HOST_DEVICE float gelu_slope(Gelu kind, float x) {
  // Both are flat there in fp32, and powers of x would overflow further out.
  if (fabsf(x) > 12.0f) return x > 0 ? 1.0f : 0.0f;
  if (kind == Gelu::tanh) {
    const float t = tanhf(gelu_tanh_argument(x));
    const float inner = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
  }
  return 0.5f * (1.0f + erff(x * 0.7071067812f)) + x * 0.3989422804f * expf(-0.5f * x * x);
}

OASES_HOST_DEVICE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

OASES_HOST_DEVICE float silu_of(float x) { return x * sigmoid_of(x); }

OASES_HOST_DEVICE float silu_slope(float x) {
  const float s = sigmoid_of(x);
  return s * (1.0f + x * (1.0f - s));
}

// Gate and up of SwiGLU, or their gradients, whose rows are `stride` apart: two tensors, or the halves of one.
template <typename T>
struct Halves {
  T *gate, *up;
  int64_t stride;
};

template <typename T, typename Void>
Halves<T> halves_of(Void* x, Void* up, int64_t n) {
  T* const gate = static_cast<T*>(x);
  return {gate, up ? static_cast<T*>(up) : gate + n, up ? n : 2 * n};
}

}  // namespace oases
