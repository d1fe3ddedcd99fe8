// c10d Work of several steps that this process queued on a stream of an accelerator.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "local_work.h"

namespace oases {

class StreamWork : public c10d::Work, public Judgement {
 public:
  // Ends where the stream is now. steps: works of another backend whose failures are this one's.
  StreamWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Stream stream,
             std::vector<c10::intrusive_ptr<c10d::Work>> steps)
      : Work(rank, type), outputs_(std::move(outputs)), end_(stream.device_type()), steps_(std::move(steps)) {
    end_.record(stream);
  }

  bool isCompleted() override { return failure() || end_.query(); }
  std::exception_ptr exception() const override { return failure(); }
  // The current stream waits, and the host does not.
  bool wait(std::chrono::milliseconds) override {
    if (const auto error = failure()) std::rethrow_exception(error);
    const c10::Device device = outputs_.front().device();
    end_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  std::exception_ptr failure() const {
    for (const auto& step : steps_)
      if (const auto error = step->exception()) return error;
    return nullptr;
  }

  std::vector<at::Tensor> outputs_;
  c10::Event end_;
  std::vector<c10::intrusive_ptr<c10d::Work>> steps_;
};

}  // namespace oases
