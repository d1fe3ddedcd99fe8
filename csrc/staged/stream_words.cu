#include <cuda.h>
#include <cudaTypedefs.h>

#include "cuda_words.h"
#include "device.h"

namespace oases::cuda {
namespace {

// A function of the driver, looked up while the program runs: it starts where there is no driver, too.
template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result), name);
#endif
  if (result != cudaDriverEntryPointSuccess || !found)
    throw std::runtime_error(std::string("the GPU's driver has no ") + name +
                             "; update it, or use the backend nccl");
  return reinterpret_cast<Function>(found);
}

void check_driver_call(CUresult result, const char* name) {
  if (result == CUDA_SUCCESS) return;
  const auto error_text = driver_function<PFN_cuGetErrorString_v6000>("cuGetErrorString");
  const char* text = nullptr;
  error_text(result, &text);
  throw std::runtime_error(std::string(name) + ": " + (text ? text : "error " + std::to_string(result)));
}

// Of a word in registered memory.
CUdeviceptr address_of(const uint32_t* word) {
  void* address = nullptr;
  check(cudaHostGetDevicePointer(&address, const_cast<uint32_t*>(word), 0), "cudaHostGetDevicePointer");
  return reinterpret_cast<CUdeviceptr>(address);
}

}  // namespace

void register_memory(void* memory, int64_t bytes) {
  check(
      cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable | cudaHostRegisterMapped),
      "cudaHostRegister");
}

void unregister_memory(void* memory) { check(cudaHostUnregister(memory), "cudaHostUnregister"); }

void write_word(uint32_t* word, uint32_t value, void* stream) {
  static const auto write = driver_function<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32");
  // The default: what the stream did before is seen first.
  check_driver_call(
      write(static_cast<CUstream>(stream), address_of(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue32");
}

void wait_for_word(const uint32_t* word, uint32_t value, void* stream) {
  static const auto wait = driver_function<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32");
  check_driver_call(wait(static_cast<CUstream>(stream), address_of(word), value, CU_STREAM_WAIT_VALUE_GEQ),
                    "cuStreamWaitValue32");
}

}  // namespace oases::cuda
