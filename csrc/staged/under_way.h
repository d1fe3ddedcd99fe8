// Streams for collectives, and which tensors those still use.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>
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
    const std::vector<Range> memory = memory_of(used);
    const auto meet = [](const Range& one, const Range& other) {
      return one.first < other.second && other.first < one.second;
    };
    for (const auto& [theirs, ended] : earlier_) {
      const auto same = std::find_first_of(memory.begin(), memory.end(), theirs.begin(), theirs.end(), meet);
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
  using Range = std::pair<const char*, const char*>;  // parts of one tensor do not wait for one another
  struct Earlier {
    std::vector<Range> memory;
    std::weak_ptr<const c10::Event> done;
  };
  static std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors) {
    std::vector<Range> found;
    for (const auto& tensor : tensors) {
      int64_t numbers = tensor.numel() > 0 ? 1 : 0;
      for (int64_t dim = 0; numbers > 0 && dim < tensor.dim(); ++dim)
        numbers += (tensor.size(dim) - 1) * tensor.stride(dim);
      const char* const begin = static_cast<const char*>(tensor.const_data_ptr());
      found.emplace_back(begin, begin + numbers * static_cast<int64_t>(tensor.element_size()));
    }
    return found;
  }
  std::deque<Earlier> earlier_;
};

}  // namespace oases
