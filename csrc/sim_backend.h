// `sim`: a c10d backend with the timing of a slow link. A collective takes start-up + bytes on the wire /
// bandwidth, one after another, on a worker thread; an inner backend moves the data. It makes overlap visible
// on any machine and its tests exact. On an accelerator with `single_process` as inner backend, the time
// passes on a stream of its own in a kernel that only waits, without a host thread.
#pragma once

#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "worker.h"

namespace oases {

class SimBackend : public c10d::Backend {
 public:
  // `inner` moves the data (a gloo backend); startup in seconds, bandwidth in bytes per second and rank.
  SimBackend(c10::intrusive_ptr<c10d::Backend> inner, double startup_seconds, double bandwidth);

  const std::string getBackendName() const override { return "sim"; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  // `wire_bytes` is what this rank sends; `start` issues the same collective on the inner backend.
  Work enqueue(c10d::OpType type, double wire_bytes, Tensors outputs, std::function<Work()> start);
  Work enqueue_on_device(c10d::OpType type, double seconds, Tensors outputs,
                         const std::function<Work()>& start);

  c10::intrusive_ptr<c10d::Backend> inner_;
  const double startup_seconds_, bandwidth_;
  std::optional<c10::Stream> device_link_;
  Worker link_;  // last member: its thread reads the others
};

}  // namespace oases
