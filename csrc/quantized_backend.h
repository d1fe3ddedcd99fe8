// c10d backend that sends quantised numbers through another one: 8 bits each, and an fp32 scale per block of 128
// (quantize_kernels.h). An all-reduce takes two shots: each rank quantises the other ranks' parts, an all-to-all
// brings them there, each sums its part in fp32 and quantises the sum, and an all-gather brings it to all. All ranks
// decode the same bytes, so their results are equal to the bit. Collectives run one after another on a thread of its
// own: the order on the inner backend is that of the calls, on every rank.
//
// One collective in 61 of each label is measured: the relative error that rounding made in the whole group. A layer
// of which the last three sums that were measured were above LayerErrors::kLargest is summed by the inner backend in
// bf16 from then on. The ranks sum what they measured, and each layer's state changes in the order of the collectives,
// so all change at the same one.
//
// Tensors of an accelerator take the same steps on a stream of the backend's own, for which neither the host nor the
// caller's stream waits before the caller does. What is measured there is read when the layer's next sample is due,
// which is the same collective on all ranks.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "rounding_errors.h"
#include "worker.h"

namespace oases {

class QuantizedBackend : public c10d::Backend {
 public:
  // on_cpu, on_device: move the bytes of tensors of the CPU and of an accelerator; used by nothing else. One may be
  // null.
  explicit QuantizedBackend(c10::intrusive_ptr<c10d::Backend> on_cpu,
                            c10::intrusive_ptr<c10d::Backend> on_device = nullptr);

  const std::string getBackendName() const override { return "quantized"; }
  // Of collectives started here, for TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares the ranks'.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  // Label of the next collective, for what is known of its errors: an op of a schedule, or a text of the caller's.
  void set_label(const std::string& label) { label_ = label; }
  // Bytes of packed numbers given to the inner backend to send to other ranks so far.
  int64_t bytes_sent() const { return bytes_sent_; }

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  // tensors: the one to sum, and perhaps its residual (error feedback), fp32: what earlier sums lost by rounding on
  // this rank, added to the tensor here and replaced by what this one loses; then no error makes it exempt.
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Piece;
  using Run = std::function<void(Rounding&)>;
  void sum(const at::Tensor& data, Rounding& rounding);
  Work enqueue(c10d::OpType type, Tensors outputs, const Run& run, const Run& in_bf16 = nullptr);
  Work on_stream(c10d::OpType type, Tensors outputs, const Run& run, const Run& in_bf16);
  static void finish(Work& work, Rounding& rounding);
  Work exchange(at::Tensor& received, at::Tensor& sent);

  // Of the tensor's device.
  c10d::Backend& inner(const at::Tensor& tensor) const;

  c10::intrusive_ptr<c10d::Backend> on_cpu_, on_device_;
  uint64_t calls_ = 0;
  std::string label_;
  ErrorsByLayer layers_;  // of the worker's thread
  std::atomic<int64_t> bytes_sent_{0};
  // Of an accelerator, and of the callers' thread.
  std::optional<c10::Stream> stream_;
  ErrorsByLayer layers_there_;
  Worker worker_;  // last member: its thread reads the others
};

}  // namespace oases
