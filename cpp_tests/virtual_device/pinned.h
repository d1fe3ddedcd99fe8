// Memory of the host that streams of the virtual device copy from and to while the host goes on.
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

namespace virtual_device {

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = std::malloc(std::max<size_t>(bytes, 1));
    const std::lock_guard lock(mutex_);
    all_.insert(data);
    return {data, data, &released, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &released; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  // Memory of others, as if it had been allocated here.
  void add(const void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    added_[data] = bytes;
  }
  void remove(const void* data) {
    const std::lock_guard lock(mutex_);
    added_.erase(data);
  }
  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    for (const auto& [start, bytes] : added_)
      if (data >= start && data < static_cast<const char*>(start) + bytes) return true;
    return all_.count(data) > 0;
  }
  size_t added() {
    const std::lock_guard lock(mutex_);
    return added_.size();
  }
  static Pinned& instance() {
    static auto* const made = new Pinned();
    return *made;
  }

 private:
  static void released(void* data) {
    {
      const std::lock_guard lock(instance().mutex_);
      instance().all_.erase(data);
    }
    std::free(data);
  }
  std::mutex mutex_;
  std::unordered_set<const void*> all_;
  std::map<const void*, size_t> added_;
};

}  // namespace virtual_device
