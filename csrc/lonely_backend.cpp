#include "lonely_backend.h"

namespace oases {
namespace {

// Done when it is made: on an accelerator what it did is on the current stream.
class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

LonelyBackend::Work LonelyBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions&) {
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::BROADCAST, tensors);
}

LonelyBackend::Work LonelyBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions&) {
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::ALLREDUCE, tensors);
}

LonelyBackend::Work LonelyBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions&) {
  for (auto& output : outputs.front()) output.copy_(inputs.front());
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::ALLGATHER, outputs.front());
}

LonelyBackend::Work LonelyBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions&) {
  if (input.numel() > 0) output.view({getSize(), -1}).copy_(input.reshape({1, -1}).expand({getSize(), -1}));
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::_ALLGATHER_BASE, Tensors{output});
}

LonelyBackend::Work LonelyBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions&) {
  if (output.numel() > 0) output.view(-1).copy_(input.reshape({getSize(), -1})[getRank()]);
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::_REDUCE_SCATTER_BASE, Tensors{output});
}

LonelyBackend::Work LonelyBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                                                 std::vector<int64_t>&, const c10d::AllToAllOptions&) {
  // The others send what they would be sent, as far as it fits.
  const auto rows = std::min(output.size(0), input.size(0));
  output.zero_();
  output.narrow(0, 0, rows).copy_(input.narrow(0, 0, rows));
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::ALLTOALL_BASE, Tensors{output});
}

LonelyBackend::Work LonelyBackend::barrier(const c10d::BarrierOptions&) {
  return c10::make_intrusive<DoneWork>(getRank(), c10d::OpType::BARRIER, Tensors{});
}

}  // namespace oases
