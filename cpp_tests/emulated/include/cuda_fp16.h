#pragma once

#include <cstring>

struct __half {
  unsigned short bits;
};
inline float __half2float(__half x) {
  _Float16 half;
  std::memcpy(&half, &x, sizeof x);
  return static_cast<float>(half);
}
inline __half __float2half_rn(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  __half bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
