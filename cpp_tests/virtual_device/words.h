// Words of host memory for streams of the virtual device, as the backend `staged` asks for them.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "../../csrc/staged/stream_words.h"
#include "operators.h"

namespace virtual_device {

// A wait looks now and then, on the stream's own thread; its time is not on the device's clocks.
class Words final : public oases::StreamWords {
 public:
  void add_memory(std::byte* memory, int64_t bytes) override { Pinned::instance().add(memory, bytes); }
  void remove_memory(std::byte* memory) override {
    Pinned::instance().remove(memory);
    TORCH_CHECK(!settings.broken, "the virtual device is broken");
  }
  void write(const c10::Stream& on, uint32_t* word, uint32_t value) override {
    Stream& stream = stream_of(on);
    stream.put([word, value, &stream](double&) {
      stream.delay();
      std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
    });
  }
  void wait(const c10::Stream& on, const uint32_t* word, uint32_t value) override {
    stream_of(on).put([word = const_cast<uint32_t*>(word), value](double&) {
      while (!oases::reached(std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire), value))
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
};

}  // namespace virtual_device
