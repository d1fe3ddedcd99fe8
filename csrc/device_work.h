// c10d Work of a collective on streams.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace oases {

// A wait makes the current stream wait, never the host. done: recorded after all of the collective.
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Device device,
             std::shared_ptr<const c10::Event> done)
      : Work(rank, type), outputs_(std::move(outputs)), device_(device), done_(std::move(done)) {}

  bool isCompleted() override { return done_->query(); }
  bool isSuccess() const override { return done_->query(); }
  bool wait(std::chrono::milliseconds) override {
    done_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }

 protected:
  const std::vector<at::Tensor> outputs_;
  const c10::Device device_;
  const std::shared_ptr<const c10::Event> done_;
};

}  // namespace oases
