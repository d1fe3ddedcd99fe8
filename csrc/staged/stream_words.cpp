#include "stream_words.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "cuda_words.h"
#include "kernels.h"

namespace oases {
namespace {

#ifdef OASES_WITH_CUDA
// By the driver's stream memory operations (stream_words.cu).
class CudaWords final : public StreamWords {
 public:
  void add_memory(std::byte* memory, int64_t bytes) override {
    const OnDevice on(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
    cuda::register_memory(memory, bytes);
  }
  void remove_memory(std::byte* memory) override {
    const OnDevice on(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
    cuda::unregister_memory(memory);
  }
  void write(const c10::Stream& stream, uint32_t* word, uint32_t value) override {
    const OnDevice on(stream.device());
    cuda::write_word(word, value, stream.native_handle());
  }
  void wait(const c10::Stream& stream, const uint32_t* word, uint32_t value) override {
    const OnDevice on(stream.device());
    cuda::wait_for_word(word, value, stream.native_handle());
  }

 private:
  // For both runtimes. The guard sets torch's device back, which set_device changes, too.
  struct OnDevice {
    explicit OnDevice(c10::Device device) : guard(device) { cuda::set_device(device.index()); }
    const c10::DeviceGuard guard;
  };
};
#endif

struct KnownWords {
  std::mutex mutex;
  std::map<c10::DeviceType, StreamWords*> by_type;
};

// Never destroyed: groups may be destroyed at exit.
KnownWords& known_words() {
  static auto* const known = [] {
    auto* const made = new KnownWords;
#ifdef OASES_WITH_CUDA
    made->by_type[c10::DeviceType::CUDA] = new CudaWords;
#endif
    return made;
  }();
  return *known;
}

}  // namespace

void register_stream_words(c10::DeviceType type, StreamWords* words) {
  const std::lock_guard<std::mutex> lock(known_words().mutex);
  known_words().by_type[type] = words;
}

StreamWords& stream_words_of(c10::DeviceType type) {
  const std::lock_guard<std::mutex> lock(known_words().mutex);
  const auto found = known_words().by_type.find(type);
  TORCH_CHECK_VALUE(found != known_words().by_type.end(), "staged: streams of ",
                    c10::DeviceTypeName(type, true),
                    " cannot wait for words of host memory in this build of oases; build it where nvcc is "
                    "available for CUDA, or give tensors there to another backend");
  return *found->second;
}

}  // namespace oases
