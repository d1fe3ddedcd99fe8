// `single_process`: a c10d backend in which one process represents a whole group (compare torch's "fake"
// backend). The other ranks are assumed to hold the same data in a gather and zeros in a sum, so nothing is
// sent; under the `sim` backend only time passes. This shows on one device what a schedule hides, without the
// other ranks' compute.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace oases {

class SingleProcessBackend : public c10d::Backend {
 public:
  SingleProcessBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "single_process"; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
};

}  // namespace oases
