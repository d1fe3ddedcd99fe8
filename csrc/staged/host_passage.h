// Tensors of a device on their way through pinned memory of the host, where another backend's call is made on them.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "stream_words.h"
#include "under_way.h"
#include "worker.h"

namespace oases {

// Of one device. Copies to the host and back run on streams of their own, behind the current one, so that those of a
// call run beside the calls before and after it. The thread of the host that makes the call looks until its tensors
// have come; no stream waits for a rank but the one that brings results back.
class HostPassage {
 public:
  using Tensors = std::vector<at::Tensor>;
  // Of copies on the host, contiguous; an output that is an input has one copy. Until it ends, they live.
  using Call = std::function<void(const Tensors& outputs, const Tensors& inputs)>;

  // Raises ValueError where streams of such a device cannot wait for the host.
  explicit HostPassage(c10::Device device);
  // Once the worker that was given has ended.
  ~HostPassage();
  HostPassage(const HostPassage&) = delete;
  HostPassage& operator=(const HostPassage&) = delete;
  c10::Device device() const { return device_; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  // Queues a call on the worker, the same one for all; where it fails, outputs are NaN. results: of the work. steps: works
  // whose failures are its own, too.
  Work queue(Worker& worker, int rank, c10d::OpType type, Tensors results, const Tensors& outputs,
             const Tensors& inputs, Call call, std::vector<Work> steps = {});

 private:
  const c10::Device device_;
  StreamWords& words_;
  const c10::Stream out_, in_;
  std::mutex mutex_;  // of what follows: tickets are taken in the order of the worker's calls
  uint32_t tickets_ = 0;
  UnderWay under_way_;
  std::deque<std::shared_ptr<const c10::Event>> ends_;  // of calls that may not have ended
  uint32_t* const returned_;                            // the latest ticket whose results are on the host
};

}  // namespace oases
