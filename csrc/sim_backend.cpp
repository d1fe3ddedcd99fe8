#include "sim_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "device_work.h"
#include "kernels.h"

namespace oases {
namespace {

// Keeps a stream busy for so long.
void occupy(double seconds, const c10::Stream& stream) {
#ifdef OASES_WITH_CUDA
  const c10::DeviceGuard guard(stream.device());  // sets torch's device back, which set_device changes, too
  cuda::set_device(stream.device_index());
  cuda::occupy(static_cast<int64_t>(1e9 * seconds), stream.native_handle());
#else
  TORCH_CHECK(false, "sim: this build of oases has no CUDA kernels, so a link cannot be simulated for ",
              stream.device(), " (", seconds, " s requested); build it where nvcc is available");
#endif
}

double bytes_of(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

double bytes_of(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  for (const auto& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

}  // namespace

SimBackend::SimBackend(c10::intrusive_ptr<c10d::Backend> inner, double startup_seconds, double bandwidth)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      startup_seconds_(startup_seconds),
      bandwidth_(bandwidth) {
  TORCH_CHECK_VALUE(startup_seconds >= 0, "sim: the start-up must be at least 0 seconds, got ",
                    startup_seconds);
  TORCH_CHECK_VALUE(bandwidth > 0, "sim: the bandwidth must be above 0 bytes per second, got ", bandwidth);
}

SimBackend::Work SimBackend::enqueue(c10d::OpType type, double wire_bytes, Tensors outputs,
                                     std::function<Work()> start) {
  const bool on_device = !outputs.empty() && !outputs.front().is_cpu();
  if (on_device && inner_->getBackendName() == "single_process")
    return enqueue_on_device(type, startup_seconds_ + wire_bytes / bandwidth_, std::move(outputs), start);
  const double seconds = startup_seconds_ + wire_bytes / bandwidth_;
  return link_.enqueue(getRank(), type, std::move(outputs), [seconds, start = std::move(start)](LocalWork&) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::exception_ptr error;
    try {
      start()->wait();
    } catch (...) {
      error = std::current_exception();
    }
    std::this_thread::sleep_until(until);
    if (error) std::rethrow_exception(error);
  });
}

SimBackend::Work SimBackend::enqueue_on_device(c10d::OpType type, double seconds, Tensors outputs,
                                               const std::function<Work()>& start) {
  const c10::Device device = outputs.front().device();
  const c10::impl::VirtualGuardImpl impl(device.type());
  if (!device_link_) device_link_ = impl.getNewStream(device, -1);  // high priority, like NCCL's
  const c10::Stream link = *device_link_;
  c10::Event ready(device.type());
  const auto done = std::make_shared<c10::Event>(device.type());
  ready.record(impl.getStream(device));
  ready.block(link);
  occupy(seconds, link);
  {
    const c10::StreamGuard on_link(link);
    start()->wait();
  }
  done->record(link);
  return c10::make_intrusive<DeviceWork>(getRank(), type, std::move(outputs), link, done);
}

// Bytes of the usual ring and tree algorithms: an all-reduce sends 2 (n-1)/n of the tensor.
SimBackend::Work SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return enqueue(c10d::OpType::BROADCAST, bytes_of(tensors), tensors,
                 [this, tensors, options]() mutable { return inner_->broadcast(tensors, options); });
}

SimBackend::Work SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const double n = getSize();
  return enqueue(c10d::OpType::ALLREDUCE, 2 * (n - 1) / n * bytes_of(tensors), tensors,
                 [this, tensors, options]() mutable { return inner_->allreduce(tensors, options); });
}

SimBackend::Work SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return enqueue(c10d::OpType::REDUCE, bytes_of(tensors), tensors,
                 [this, tensors, options]() mutable { return inner_->reduce(tensors, options); });
}

SimBackend::Work SimBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  return enqueue(
      c10d::OpType::ALLGATHER, (getSize() - 1) * bytes_of(inputs), outputs.front(),
      [this, outputs, inputs, options]() mutable { return inner_->allgather(outputs, inputs, options); });
}

SimBackend::Work SimBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  return enqueue(
      c10d::OpType::_ALLGATHER_BASE, (getSize() - 1) * bytes_of(input), {output},
      [this, output, input, options]() mutable { return inner_->_allgather_base(output, input, options); });
}

SimBackend::Work SimBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  return enqueue(
      c10d::OpType::GATHER, bytes_of(inputs), outputs.empty() ? Tensors{} : outputs.front(),
      [this, outputs, inputs, options]() mutable { return inner_->gather(outputs, inputs, options); });
}

SimBackend::Work SimBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  return enqueue(
      c10d::OpType::SCATTER, inputs.empty() ? 0 : bytes_of(inputs.front()), outputs,
      [this, outputs, inputs, options]() mutable { return inner_->scatter(outputs, inputs, options); });
}

SimBackend::Work SimBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  return enqueue(c10d::OpType::REDUCE_SCATTER, (getSize() - 1) * bytes_of(outputs), outputs,
                 [this, outputs, inputs, options]() mutable {
                   return inner_->reduce_scatter(outputs, inputs, options);
                 });
}

SimBackend::Work SimBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  return enqueue(c10d::OpType::_REDUCE_SCATTER_BASE, (getSize() - 1) * bytes_of(output), {output},
                 [this, output, input, options]() mutable {
                   return inner_->_reduce_scatter_base(output, input, options);
                 });
}

SimBackend::Work SimBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions& options) {
  c10d::checkSplitSizes(output_splits, output, getSize());
  c10d::checkSplitSizes(input_splits, input, getSize());
  // A link is as busy with sending as with receiving; a rank's own rows are not sent.
  const auto bytes_on_wire = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    const double n = getSize(), all = bytes_of(tensor);
    if (splits.empty() || tensor.numel() == 0) return (n - 1) / n * all;
    return all * (1.0 - static_cast<double>(splits[getRank()]) / static_cast<double>(tensor.size(0)));
  };
  const double bytes = std::max(bytes_on_wire(input, input_splits), bytes_on_wire(output, output_splits));
  return enqueue(c10d::OpType::ALLTOALL_BASE, bytes, {output},
                 [this, output, input, output_splits, input_splits, options]() mutable {
                   return inner_->alltoall_base(output, input, output_splits, input_splits, options);
                 });
}

SimBackend::Work SimBackend::barrier(const c10d::BarrierOptions& options) {
  return enqueue(c10d::OpType::BARRIER, 0, {}, [this, options] { return inner_->barrier(options); });
}

}  // namespace oases
