// c10d Works of collectives on streams.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "local_work.h"

namespace oases {

// As NCCL's: a wait makes the current stream wait, and the host only for a time that was given. An error is raised by
// the waits that follow it. done: recorded on `stream` after all of the collective.
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<const c10::Event> done)
      : Work(rank, type), outputs_(std::move(outputs)), stream_(stream), done_(std::move(done)) {}

  bool isCompleted() override { return exception() || done_->query(); }
  bool isSuccess() const override { return done_->query() && !exception(); }
  std::exception_ptr exception() const override { return nullptr; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (const auto error = exception()) std::rethrow_exception(error);
    done_->block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
    if (timeout == kNoTimeout) return true;
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted()) {
      TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < end, operation(),
                       ": not done after ", timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // Complete at once: what uses its value is queued behind the collective.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::StreamGuard on(stream_);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{stream_.device()});
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 protected:
  virtual std::string operation() const { return c10d::opTypeToString(retrieveOpType()); }

  const std::vector<at::Tensor> outputs_;
  const c10::Stream stream_;
  const std::shared_ptr<const c10::Event> done_;
};

// Of several steps, works of other backends, whose failures are its own.
class StepsWork final : public DeviceWork, public Judgement {
 public:
  StepsWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Stream stream,
            std::shared_ptr<const c10::Event> done, std::vector<c10::intrusive_ptr<c10d::Work>> steps)
      : DeviceWork(rank, type, std::move(outputs), stream, std::move(done)), steps_(std::move(steps)) {}
  std::exception_ptr exception() const override {
    for (const auto& step : steps_)
      if (const auto error = step->exception()) return error;
    return nullptr;
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> steps_;
};

}  // namespace oases
