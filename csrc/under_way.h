// Streams for collectives, and which tensors those still use.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

namespace oases {

inline c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, -1);  // high priority, like NCCL's
}

// Lets streams wait for earlier collectives of the same tensors, for which nobody has waited: in one stream, as NCCL
// has, they would be in order.
class UnderWay {
 public:
  void wait_for(const std::vector<at::Tensor>& used, const std::vector<c10::Stream>& streams) {
    while (!earlier_.empty() && earlier_.front().done.expired()) earlier_.pop_front();
    const std::vector<const void*> memory = memory_of(used);
    for (const auto& [theirs, ended] : earlier_) {
      const auto same = std::find_first_of(memory.begin(), memory.end(), theirs.begin(), theirs.end());
      const auto done = same == memory.end() ? nullptr : ended.lock();
      if (done)
        for (const auto& stream : streams) done->block(stream);
    }
  }
  // done: lives until the collective has ended.
  void add(const std::vector<at::Tensor>& used, const std::shared_ptr<const c10::Event>& done) {
    earlier_.push_back({memory_of(used), done});
  }

 private:
  struct Earlier {
    std::vector<const void*> memory;
    std::weak_ptr<const c10::Event> done;
  };
  static std::vector<const void*> memory_of(const std::vector<at::Tensor>& tensors) {
    std::vector<const void*> found;
    for (const auto& tensor : tensors) found.push_back(tensor.storage().data());
    return found;
  }
  std::deque<Earlier> earlier_;
};

}  // namespace oases
