// One call of a launcher in place of its CPU twin: its arguments in checked memory, and what the twin makes of them.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "machine.h"

namespace emulated {

using oases::DType;

// Calls by launcher; written to the file $OASES_EMULATED_CALLS at the end.
inline std::map<std::string, int> calls;

struct AtExit {
  ~AtExit() {
    const char* path = std::getenv("OASES_EMULATED_CALLS");
    FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    for (const auto& [name, count] : calls) std::fprintf(file, "%s %d\n", name.c_str(), count);
    std::fclose(file);
  }
};
inline AtExit at_exit;

inline void* twin_of(void* stand_in) {
  static void* const core = [] {
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
          if (std::strstr(info->dlpi_name, "/_C.")) *static_cast<std::string*>(to) = info->dlpi_name;
          return 0;
        },
        &path);
    return dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW);
  }();
  Dl_info info;
  void* twin = core && dladdr(stand_in, &info) && info.dli_sname ? dlsym(core, info.dli_sname) : nullptr;
  if (!twin || twin == stand_in)
    throw std::runtime_error("emulated: oases._C has no CPU twin of this kernel");
  return twin;
}

// The CPU's function of the name and type of `stand_in`.
template <auto stand_in>
auto twin() {
  static const auto found = reinterpret_cast<decltype(stand_in)>(twin_of(reinterpret_cast<void*>(stand_in)));
  return found;
}

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline double number(DType dtype, const void* from, int64_t i) {
  const auto* half = static_cast<const unsigned short*>(from);
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(from)[i];
    case DType::f16:
      return __half2float({half[i]});
    case DType::bf16:
      return __bfloat162float({half[i]});
  }
  return 0;
}

// One call of a launcher: places its arguments, and compares its outputs with those of the twin.
class Call {
 public:
  explicit Call(const char* name) : lock_(mutex()), name_(name) { ++calls[name]; }
  ~Call() { forget(); }

  template <typename T>
  const T* in(const T* from, int64_t count, int64_t size = sizeof(T)) {
    return static_cast<const T*>(place(const_cast<T*>(from), count * size, size, Kind::input));
  }
  const void* in(const void* from, int64_t count, DType dtype) {
    return place(const_cast<void*>(from), count * size_of(dtype), size_of(dtype), Kind::input);
  }
  // An output that the twin computes, too, into what `twin` then gives.
  void* out(void* to, int64_t count, DType dtype, Kind kind = Kind::output) {
    return add(to, count, size_of(dtype), static_cast<int>(dtype), kind);
  }
  float* out(float* to, int64_t count, Kind kind = Kind::output) {
    return static_cast<float*>(add(to, count, 4, 0, kind));
  }
  int64_t* out(int64_t* to, int64_t count, Kind kind = Kind::output) {
    return static_cast<int64_t*>(add(to, count, 8, -1, kind));
  }
  uint8_t* out(uint8_t* to, int64_t count) {
    return static_cast<uint8_t*>(add(to, count, 1, -1, Kind::output));
  }
  template <typename T>
  T* twin(T* to) {
    for (Output& output : outputs_)
      if (output.to == to) return reinterpret_cast<T*>(output.twin.data());
    return nullptr;
  }

  void end(double tolerance = 0) {
    finish(name_);
    for (const Output& output : outputs_)
      output.type < 0 ? compare_bytes(output) : compare_numbers(output, tolerance);
  }

 private:
  struct Output {
    void* to;
    int64_t count, size;
    int type;
    std::vector<unsigned char> twin;
  };

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

  void* add(void* to, int64_t count, int64_t size, int type, Kind kind) {
    if (!to) return nullptr;
    auto* const bytes = static_cast<unsigned char*>(to);
    outputs_.push_back({to, count, size, type, std::vector<unsigned char>(bytes, bytes + count * size)});
    return place(to, count * size, size, kind);
  }

  [[noreturn]] void differ(const Output& output, int64_t at, const std::string& values) const {
    throw std::runtime_error(std::string("emulated: ") + name_ + ": number " + std::to_string(at) + " of " +
                             std::to_string(output.count) + " differs from the CPU's: " + values);
  }

  void compare_bytes(const Output& output) const {
    const auto* ours = static_cast<const unsigned char*>(output.to);
    for (int64_t i = 0; i < output.count * output.size; ++i)
      if (ours[i] != output.twin[i]) differ(output, i / output.size, "bytes");
  }

  void compare_numbers(const Output& output, double tolerance) const {
    const auto type = static_cast<DType>(output.type);
    const double rounding = type == DType::f32 ? 1e-5 : type == DType::f16 ? 2e-3 : 1.6e-2;
    double largest = 1;
    for (int64_t i = 0; i < output.count; ++i) {
      const double value = std::fabs(number(type, output.twin.data(), i));
      if (std::isfinite(value)) largest = std::max(largest, value);
    }
    for (int64_t i = 0; i < output.count; ++i) {
      const double a = number(type, output.to, i), b = number(type, output.twin.data(), i);
      if (a == b || (std::isnan(a) && std::isnan(b))) continue;
      if (!(std::fabs(a - b) <= (tolerance ? tolerance * rounding : 0) * largest))
        differ(output, i, std::to_string(a) + " and " + std::to_string(b));
    }
  }

  std::lock_guard<std::mutex> lock_;
  const char* name_;
  std::vector<Output> outputs_;
};

}  // namespace emulated
