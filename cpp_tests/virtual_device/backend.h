// A c10d backend of the virtual device with NCCL's manners, over gloo: collectives run on a stream of the
// communicator's, in one order; wait() makes the current stream wait, and not the host; isSuccess() throws; the first
// message between two ranks holds the hosts of both until they have met; an abort ends what is pending.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>

#include "operators.h"

namespace virtual_device {

class Work final : public c10d::Work {
 public:
  struct State {
    SharedEvent end = std::make_shared<Event>();
    std::mutex mutex;
    std::exception_ptr error;
  };

  Work(int rank, c10d::OpType type, std::vector<at::Tensor> tensors, c10::Stream stream)
      : c10d::Work(rank, type), stream_(stream), tensors_(std::move(tensors)) {}
  std::shared_ptr<State> state() const { return state_; }

  bool isCompleted() override { return exception() || state_->end->passed(); }
  bool isSuccess() const override {
    C10_THROW_ERROR(NotImplementedError, "isSuccess() is deprecated, as NCCL's");
  }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->error;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (const auto error = exception()) std::rethrow_exception(error);
    virtual_device::block(state_->end, current_stream(stream_.device_index()));
    if (opType_ == c10d::OpType::BARRIER || timeout != kNoTimeout) virtual_device::synchronize(state_->end);
    tensors_.clear();  // NCCL's work keeps them until the wait, and no longer
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::StreamGuard on(stream_);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{stream_.device()});
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  const c10::Stream stream_;
  std::vector<at::Tensor> tensors_;
};

class Backend final : public c10d::Backend {
 public:
  using Started = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Gloo = c10::intrusive_ptr<c10d::Backend>;

  explicit Backend(Gloo gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_id_(next_stream()) {}

  const std::string getBackendName() const override { return "virtual"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  void abort() override { aborted_ = true; }
  void shutdown() override { aborted_ = true; }

  Started broadcast(Tensors& x, const c10d::BroadcastOptions& options) override {
    return collective(c10d::OpType::BROADCAST, x, x[0].numel(),
                      [x = view(x), options](auto& gloo) mutable { return gloo.broadcast(x, options); });
  }
  Started allreduce(Tensors& x, const c10d::AllreduceOptions& options) override {
    return collective(c10d::OpType::ALLREDUCE, x, x[0].numel(),
                      [x = view(x), options](auto& gloo) mutable { return gloo.allreduce(x, options); });
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return collective(c10d::OpType::_ALLGATHER_BASE, {output, input}, input.numel(),
                      [to = on_cpu(output), from = on_cpu(input), options](auto& gloo) mutable {
                        return gloo._allgather_base(to, from, options);
                      });
  }
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return collective(c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, input.numel(),
                      [to = on_cpu(output), from = on_cpu(input), options](auto& gloo) mutable {
                        return gloo._reduce_scatter_base(to, from, options);
                      });
  }
  Started alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_receive,
                        std::vector<int64_t>& to_send, const c10d::AllToAllOptions& options) override {
    return collective(
        c10d::OpType::ALLTOALL_BASE, {output, input}, -1,  // ranks have different numbers
        [to = on_cpu(output), from = on_cpu(input), to_receive, to_send, options](auto& gloo) mutable {
          return gloo.alltoall_base(to, from, to_receive, to_send, options);
        });
  }
  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Tensors all = outputs.front();
    all.push_back(inputs.front());
    std::vector<Tensors> to{view(outputs.front())};
    return collective(
        c10d::OpType::ALLGATHER, all, inputs.front().numel(),
        [to, from = view(inputs), options](auto& gloo) mutable { return gloo.allgather(to, from, options); });
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    return collective(c10d::OpType::BARRIER, {at::zeros({1}, c10::Device(kType, current_device))}, 1,
                      [options](auto& gloo) { return gloo.barrier(options); });
  }
  Started send(Tensors& x, int peer, int tag) override {
    return message(c10d::OpType::SEND, x, peer,
                   [x = view(x), peer, tag](auto& gloo, at::Tensor& time) mutable {
                     Tensors times{time};
                     gloo.send(times, peer, tag)->wait();
                     return gloo.send(x, peer, tag);
                   });
  }
  Started recv(Tensors& x, int peer, int tag) override {
    return message(c10d::OpType::RECV, x, peer,
                   [x = view(x), peer, tag](auto& gloo, at::Tensor& time) mutable {
                     Tensors times{at::zeros({1}, at::kDouble)};
                     gloo.recv(times, peer, tag)->wait();
                     time.copy_(at::maximum(time, times[0]));
                     return gloo.recv(x, peer, tag);
                   });
  }

 private:
  static Tensors view(const Tensors& tensors) {
    Tensors all;
    for (const auto& x : tensors) all.push_back(on_cpu(x));
    return all;
  }

  // numbers: of elements, by which ranks see that they have started different collectives; -1: not compared.
  template <typename Run>
  Started collective(c10d::OpType type, Tensors tensors, int64_t numbers, Run run) {
    ++started_;
    const double kind = static_cast<double>(type), of = static_cast<double>(tensors[0].scalar_type());
    return queued(
        type, std::move(tensors), stream_id_, [=, this, run = std::move(run)](double& clock) mutable {
          at::Tensor mine = at::tensor({kind, static_cast<double>(numbers), of, clock}, at::kDouble);
          at::Tensor all = at::empty({getSize(), 4}, at::kDouble);
          at::Tensor flat = all.view(-1);
          finish(gloo_->_allgather_base(flat, mine));
          TORCH_CHECK(all.slice(1, 0, 3).eq(mine.slice(0, 0, 3)).all().template item<bool>(),
                      "ranks of a communicator have started different collectives; kind, elements, type and "
                      "time of each: ",
                      all);
          clock = all.select(1, 3).max().template item<double>() + settings.link_seconds;
          finish(run(*gloo_));
        });
  }
  // The two ranks of messages are a communicator of their own, with its stream.
  template <typename Run>
  Started message(c10d::OpType type, Tensors& tensors, int peer, Run run) {
    if (!peers_.count(peer)) {
      peers_[peer] = next_stream();
      Tensors token{at::zeros({1})};
      const bool first = getRank() < peer;
      for (const bool sends : {first, !first}) {
        finish(sends ? gloo_->send(token, peer, kConnecting) : gloo_->recv(token, peer, kConnecting));
      }
    }
    return queued(type, tensors, peers_[peer], [this, run = std::move(run)](double& clock) mutable {
      at::Tensor time = at::full({1}, clock, at::kDouble);
      finish(run(*gloo_, time));
      clock = time.item<double>() + settings.link_seconds;
    });
  }
  template <typename Run>
  Started queued(c10d::OpType type, Tensors tensors, int64_t stream_id, Run run) {
    const c10::Device device = tensors.front().device();
    TORCH_CHECK(device_ < 0 || device_ == device.index(), "a communicator of device ", int(device_),
                " was given a tensor of device ", int(device.index()));
    device_ = device.index();
    for (const auto& x : tensors)
      TORCH_CHECK(x.is_contiguous() && x.device() == device, "tensors must be dense");
    const auto work = c10::make_intrusive<Work>(getRank(), type, tensors, Guard::made(device, stream_id));
    const auto ready = std::make_shared<Event>();
    record(ready, current_stream(device_));
    Stream& stream = stream_of(device_, stream_id);
    block(ready, stream);
    auto self = c10::intrusive_ptr<Backend>::reclaim_copy(this);
    stream.put([self, state = work->state(), run = std::move(run), &stream](double& clock) mutable {
      stream.delay();
      try {
        run(clock);
      } catch (...) {
        const std::lock_guard lock(state->mutex);
        state->error = std::current_exception();
      }
    });
    record(work->state()->end, stream);
    return work;
  }
  // Waits for one of gloo's, and looks up whether the group was aborted.
  void finish(const Started& work) {
    while (true) {
      TORCH_CHECK(!aborted_, "the communicator was aborted");
      const auto before = std::chrono::steady_clock::now();
      try {
        work->wait(std::chrono::milliseconds(500));
        return;
      } catch (const std::exception&) {
        if (work->isCompleted() || std::chrono::steady_clock::now() - before < std::chrono::milliseconds(450))
          throw;
      }
    }
  }

  static constexpr int kConnecting = 9000;
  const Gloo gloo_;
  const int64_t stream_id_;
  c10::DeviceIndex device_ = -1;
  std::map<int, int64_t> peers_;  // streams of messages
  std::atomic<uint64_t> started_{0};
  std::atomic<bool> aborted_{false};
};

}  // namespace virtual_device
