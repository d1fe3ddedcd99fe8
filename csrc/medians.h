// Medians of 1, 3 and 5 numbers by networks of minima and maxima, equal on host and device.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace oases {

OASES_HOST_DEVICE float lesser(float a, float b) { return b < a ? b : a; }
OASES_HOST_DEVICE float greater(float a, float b) { return a < b ? b : a; }

OASES_HOST_DEVICE float median(float a, float b, float c) {
  return greater(lesser(a, b), lesser(greater(a, b), c));
}

OASES_HOST_DEVICE float median(float a, float b, float c, float d, float e) {
  // The minimum and the maximum of the four numbers in both pairs cannot be the median of five.
  return median(greater(lesser(a, b), lesser(c, d)), lesser(greater(a, b), greater(c, d)), e);
}

// Median of 1, 3 or 5 numbers; NaN if one of them is NaN, so that a bad gradient is not hidden.
template <int count>
OASES_HOST_DEVICE float median_of(const float* x) {
  static_assert(count == 1 || count == 3 || count == 5);
  float middle = x[0], bad = x[0];
  if constexpr (count == 3) middle = median(x[0], x[1], x[2]);
  if constexpr (count == 5) middle = median(x[0], x[1], x[2], x[3], x[4]);
  // No early exit, so that compilers can vectorise a loop over medians.
  for (int i = 1; i < count; ++i) bad = x[i] != x[i] ? x[i] : bad;
  return bad != bad ? bad : middle;
}

}  // namespace oases
