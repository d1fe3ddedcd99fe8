#include "device.h"

#include "kernels.h"

namespace oases::cuda {

std::string nvcc_version() {
  return std::to_string(__CUDACC_VER_MAJOR__) + "." + std::to_string(__CUDACC_VER_MINOR__);
}

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  // nvcc's list, such as 800,900: what the command line said, so it cannot differ from what was compiled.
  for (const int number : {__CUDA_ARCH_LIST__}) names.push_back("sm_" + std::to_string(number / 10));
  return names;
}

void set_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace oases::cuda
