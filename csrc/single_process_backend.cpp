#include "single_process_backend.h"

#include "local_work.h"

namespace oases {
namespace {

// On an accelerator the result is on the current stream.
c10::intrusive_ptr<c10d::Work> done(int rank, c10d::OpType type, std::vector<at::Tensor> outputs) {
  auto work = c10::make_intrusive<LocalWork>(rank, type, std::move(outputs));
  work->end(nullptr);
  return work;
}

}  // namespace

SingleProcessBackend::Work SingleProcessBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions&) {
  return done(getRank(), c10d::OpType::BROADCAST, tensors);
}

SingleProcessBackend::Work SingleProcessBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions&) {
  return done(getRank(), c10d::OpType::ALLREDUCE, tensors);
}

SingleProcessBackend::Work SingleProcessBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions&) {
  for (auto& output : outputs.front()) output.copy_(inputs.front());
  return done(getRank(), c10d::OpType::ALLGATHER, outputs.front());
}

SingleProcessBackend::Work SingleProcessBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::AllgatherOptions&) {
  if (input.numel() > 0) output.view({getSize(), -1}).copy_(input.reshape({1, -1}).expand({getSize(), -1}));
  return done(getRank(), c10d::OpType::_ALLGATHER_BASE, Tensors{output});
}

SingleProcessBackend::Work SingleProcessBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                      const c10d::ReduceScatterOptions&) {
  if (output.numel() > 0) output.view(-1).copy_(input.reshape({getSize(), -1})[getRank()]);
  return done(getRank(), c10d::OpType::_REDUCE_SCATTER_BASE, Tensors{output});
}

SingleProcessBackend::Work SingleProcessBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                               std::vector<int64_t>&, std::vector<int64_t>&,
                                                               const c10d::AllToAllOptions&) {
  // The other ranks send what they would receive, as far as it fits.
  const auto rows = std::min(output.size(0), input.size(0));
  output.zero_();
  output.narrow(0, 0, rows).copy_(input.narrow(0, 0, rows));
  return done(getRank(), c10d::OpType::ALLTOALL_BASE, Tensors{output});
}

SingleProcessBackend::Work SingleProcessBackend::barrier(const c10d::BarrierOptions&) {
  return done(getRank(), c10d::OpType::BARRIER, Tensors{});
}

}  // namespace oases
