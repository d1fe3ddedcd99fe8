#include "device.h"

#include "kernels.h"

namespace oases::cuda {

std::string nvcc_version() {
  return std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__);
}

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  // nvcc's list, such as 800,900: it cannot differ from what was compiled.
  for (const int number : {__CUDA_ARCH_LIST__}) names.push_back("sm_" + std::to_string(number / 10));
  return names;
}

namespace {

// One thread that polls the clock: kernels on other streams keep nearly the whole device.
__global__ void watch_clock(int64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<uint64_t>(nanoseconds));
}

}  // namespace

void occupy(int64_t nanoseconds, void* stream) {
  launch("occupy", watch_clock, 1, 1, 0, stream, nanoseconds);
}

void set_device(int device) {
  static const bool fits = [] {
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check_driver(driver, CUDART_VERSION);
    return true;
  }();
  static_cast<void>(fits);
  check(cudaSetDevice(device), "cudaSetDevice");
}

}  // namespace oases::cuda
