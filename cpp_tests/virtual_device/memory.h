// Memory of the virtual device. As a caching allocator does, freed memory is handed out again at once, to the stream
// that it was allocated in; that stream overwrites it first, so whoever still reads it on another one finds NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "streams.h"

namespace virtual_device {

struct Block {
  void* data;
  size_t bytes;  // rounded
  c10::DeviceIndex device;
  int64_t stream;
  std::vector<c10::Stream> others{};  // of record_stream
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, device};
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    const int64_t stream = current_streams.at(device.index());
    const std::lock_guard lock(mutex_);
    auto& free = free_[{device.index(), stream, bytes}];
    Block* block = nullptr;
    if (free.empty()) {
      block = new Block{std::aligned_alloc(kUnit, bytes), bytes, device.index(), stream};
      stream_of(device.index(), stream).put(poisoning(block));
    } else {
      block = free.back();
      free.pop_back();
    }
    ++counts.blocks;
    auto& of_device = allocated_.at(device.index());
    of_device.increase(bytes);
    counts.bytes += static_cast<int64_t>(bytes);
    return {block->data, block, &released, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    current_stream(current_device).put([=](double&) { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_use(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = allocated_.at(device);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    allocated_.at(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    allocated_.at(device).reset_peak();
  }

 private:
  static constexpr size_t kUnit = 512;

  static Stream::Task poisoning(Block* block) {
    return [block](double&) { std::memset(block->data, 0xff, block->bytes); };
  }
  static void released(void* context);
  void release(Block* block) {
    Stream& own = stream_of(block->device, block->stream);
    const auto poison_and_keep = [this, block] {
      stream_of(block->device, block->stream).put(poisoning(block));
      const std::lock_guard lock(mutex_);
      free_[{block->device, block->stream, block->bytes}].push_back(block);
    };
    {
      const std::lock_guard lock(mutex_);
      --counts.blocks;
      counts.bytes -= static_cast<int64_t>(block->bytes);
      allocated_.at(block->device).decrease(block->bytes);
    }
    if (block->others.empty()) return poison_and_keep();
    std::vector<SharedEvent> uses;
    for (const auto& stream : block->others) {
      record(uses.emplace_back(std::make_shared<Event>()), stream_of(stream));
    }
    block->others.clear();
    record(uses.emplace_back(std::make_shared<Event>()), own);
    static auto* const janitor = new Stream();  // such memory is kept until its uses have ended
    janitor->put([uses, poison_and_keep](double&) {
      for (const auto& use : uses) use->wait(use->asked());
      poison_and_keep();
    });
  }

  std::mutex mutex_;
  std::map<std::tuple<c10::DeviceIndex, int64_t, size_t>, std::vector<Block*>> free_;
  std::array<c10::CachingAllocator::Stat, kDevices> allocated_;
};
inline Allocator& allocator() {
  static auto* const made = new Allocator();
  return *made;
}
inline void Allocator::released(void* context) { allocator().release(static_cast<Block*>(context)); }
inline void record_use(const c10::DataPtr& memory, const c10::Stream& stream) {
  auto* const block = static_cast<Block*>(memory.get_context());
  if (block && block->stream != stream.id()) block->others.push_back(stream);
}
static const bool registered = (c10::SetAllocator(kType, &allocator()), true);

}  // namespace virtual_device
