#include "nodes_backend.h"

#include <algorithm>
#include <numeric>

#include "reduce_ranks.h"
#include "staged_tensors.h"

namespace oases {

using namespace staged;

namespace {

// Of an all-reduce of a device: pieces of these many bytes are copied, summed and brought back beside one another.
constexpr int64_t kPassageBytes = 8 << 20;

// The device of tensors, or the CPU where they have none.
c10::Device device_of(const NodesBackend::Tensors& tensors) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [](const auto& tensor) { return !tensor.is_cpu(); });
  return found == tensors.end() ? c10::Device(at::kCPU) : found->device();
}

}  // namespace

NodesBackend::NodesBackend(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<StagedBackend> local,
                           std::vector<std::vector<int64_t>> ranks)
    : Backend(whole->getRank(), whole->getSize()),
      collectives_(std::move(whole), std::move(local), std::move(ranks)) {}

// Messages that are under way fail.
NodesBackend::~NodesBackend() { abort_messages(); }

void NodesBackend::abort() {
  collectives_.abort();
  abort_messages();
}

void NodesBackend::abort_messages() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [_, line] : lines_)
    if (line) line->abort();  // null where it could not be made
}

void NodesBackend::Line::wait_for(const NodesCollectives& collectives, int rank, Work message) {
  const auto note = [this](Work work) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::swap(waited_for, work);  // so the one before is freed without the lock
    TORCH_CHECK_WITH(DistBackendError, !aborted, "staged: messages were given up");
  };
  note(message);
  collectives.wait_for(rank, *message, kNoTimeout);
  note(nullptr);
}

void NodesBackend::Line::abort() {
  const std::lock_guard<std::mutex> lock(mutex);
  aborted = true;
  if (waited_for) waited_for->abort();
}

void NodesBackend::setTimeout(std::chrono::milliseconds timeout) { collectives_.set_timeout(timeout); }

void NodesBackend::check_root(const char* name, int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), name, ": no rank ", root, " in a group of ", getSize());
}

void NodesBackend::passage_on(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!passage_) passage_ = std::make_unique<HostPassage>(device);
  check_same_device(*passage_, device);
}

void NodesBackend::check_same_device(const HostPassage& passage, c10::Device device) const {
  TORCH_CHECK_VALUE(passage.device() == device, "staged: rank ", getRank(), " gave this group a tensor on ",
                    passage.device(), " before, and now one on ", device,
                    "; keep to one device, or make a group for each");
}

NodesBackend::Work NodesBackend::enqueue(Call call, Tensors results) {
  const uint64_t number = ++started_;
  const c10::Device device = device_of(joined(call.outputs, call.inputs));
  std::string refused;
  try {
    for (const auto& tensor : joined(call.outputs, call.inputs)) check_on_device(call.name, tensor, device);
    if (!device.is_cpu()) passage_on(device);
    call.check();
  } catch (const std::exception& error) {
    refused = reason_of(error);
  }
  const auto run = [=, this, name = call.name, timeout = call.timeout, run = std::move(call.run)](
                       const Tensors& outputs, const Tensors& inputs) {
    collectives_.begin(number);
    try {
      if (!refused.empty()) collectives_.refuse(name, refused, timeout);  // raises it
      run(outputs, inputs);
    } catch (const std::exception& error) {
      // A ValueError before anything was sent is that of the machine's ranks alike, perhaps of all machines'. After any
      // other error they wait for this rank in the next step, or it has left a message half sent; and streams go on with
      // what they have.
      const bool alike = !collectives_.has_sent() && dynamic_cast<const c10::ValueError*>(&error);
      if (!alike || (!device.is_cpu() && refused.empty())) collectives_.abort();
      throw;
    }
  };
  if (!device.is_cpu() && refused.empty()) {
    try {
      return passage_->queue(worker_, getRank(), call.type, std::move(results), call.outputs, call.inputs,
                             run, std::move(call.before));
    } catch (...) {  // as where its memory cannot be had: the others would wait for this rank
      collectives_.abort();
      throw;
    }
  }
  auto work = worker_.enqueue(getRank(), call.type, device.is_cpu() ? std::move(results) : Tensors{},
                              [run, outputs = std::move(call.outputs),
                               inputs = std::move(call.inputs)](LocalWork&) { run(outputs, inputs); });
  TORCH_CHECK_VALUE(device.is_cpu(), refused);
  return work;
}

NodesBackend::Work NodesBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce_coalesced(tensors, {options});
}

NodesBackend::Work NodesBackend::allreduce_coalesced(Tensors& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) {
  const auto call = [&](const Tensors& summed) {
    return Call{
        c10d::OpType::ALLREDUCE,
        "all_reduce",
        summed,
        summed,
        options.timeout,
        [summed, reduce = options.reduceOp] {
          for (const auto& tensor : summed) {
            check_layout("all_reduce", tensor);
            check_reduction("all_reduce", tensor.scalar_type(), reduce);
          }
        },
        [this, reduce = options.reduceOp, timeout = options.timeout](const Tensors& outputs, const Tensors&) {
          for (const auto& tensor : outputs) collectives_.all_reduce(tensor, reduce, timeout);
        }};
  };
  const bool long_way = !device_of(tensors).is_cpu() && tensors.size() == 1 &&
                        tensors[0].layout() == at::kStrided && tensors[0].is_contiguous() &&
                        size_of(tensors[0]) > kPassageBytes;
  if (!long_way) return enqueue(call(tensors));
  Work last;
  for (const auto& piece : tensors[0].view(-1).split(kPassageBytes / tensors[0].element_size())) {
    Call next = call({piece});
    if (last) next.before.push_back(last);  // so that the first error is the work's
    last = enqueue(std::move(next), tensors);
  }
  return last;
}

NodesBackend::Work NodesBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto check = [this, tensors, reduce = options.reduceOp, root = options.rootRank] {
    check_one("reduce", tensors.size());
    check_root("reduce", root);
    check_layout("reduce", tensors[0]);
    check_reduction("reduce", tensors[0].scalar_type(), reduce);
  };
  const auto run = [this, reduce = options.reduceOp, root = options.rootRank, timeout = options.timeout](
                       const Tensors& outputs, const Tensors& inputs) {
    const at::Tensor sum = inputs[0].clone();
    collectives_.all_reduce(sum, reduce, timeout);
    if (root == getRank()) at::Tensor(outputs[0]).copy_(sum);
  };
  return enqueue({c10d::OpType::REDUCE, "reduce", tensors, tensors, options.timeout, check, run});
}

NodesBackend::Work NodesBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto check = [this, tensors, root = options.rootRank] {
    check_one("broadcast", tensors.size());
    check_dense("broadcast", tensors[0]);
    check_root("broadcast", root);
  };
  const auto run = [this, root = options.rootRank, timeout = options.timeout](const Tensors& outputs,
                                                                              const Tensors&) {
    collectives_.broadcast(outputs[0], static_cast<int>(root), timeout);
  };
  return enqueue({c10d::OpType::BROADCAST, "broadcast", tensors, tensors, options.timeout, check, run});
}

NodesBackend::Work NodesBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) {
  const auto check = [this, output, input] { check_parts("all_gather", output, input, getSize()); };
  const auto run = [this, timeout = options.timeout](const Tensors& outputs, const Tensors& inputs) {
    collectives_.all_gather(outputs[0], inputs[0], -1, timeout);
  };
  return enqueue(
      {c10d::OpType::_ALLGATHER_BASE, "all_gather", {output}, {input}, options.timeout, check, run});
}

// To tensors of their own. root: which alone has outputs, or -1.
NodesBackend::Work NodesBackend::gather_all(c10d::OpType type, const char* name, const Tensors& outputs,
                                            const Tensors& inputs, int root,
                                            std::chrono::milliseconds timeout) {
  const auto check = [=, this] {
    check_one(name, inputs.size());
    if (root != -1) check_root(name, root);
    check_layout(name, inputs[0]);
    check_count(name, "outputs", static_cast<int64_t>(outputs.size()),
                root == -1 || root == getRank() ? getSize() : 0);
    for (const auto& output : outputs) check_alike(name, output, inputs[0]);
  };
  const auto run = [=, this](const Tensors& to, const Tensors& from) {
    const at::Tensor own = from[0].contiguous();
    const at::Tensor all = at::empty({getSize(), own.numel()}, own.options());
    collectives_.all_gather(all, own, root, timeout);
    for (size_t rank = 0; rank < to.size(); ++rank)
      at::Tensor(to[rank]).copy_(all[static_cast<int64_t>(rank)].view(to[rank].sizes()));
  };
  return enqueue({type, name, outputs, inputs, timeout, check, run});
}

NodesBackend::Work NodesBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  return gather_all(c10d::OpType::ALLGATHER, "all_gather", first_of(outputs), inputs, -1, options.timeout);
}

NodesBackend::Work NodesBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& options) {
  return gather_all(c10d::OpType::GATHER, "gather", first_of(outputs), inputs,
                    static_cast<int>(options.rootRank), options.timeout);
}

NodesBackend::Work NodesBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& options) {
  const auto check = [this, outputs, inputs = first_of(inputs), root = options.rootRank] {
    check_one("scatter", outputs.size());
    check_layout("scatter", outputs[0]);
    check_root("scatter", root);
    check_count("scatter", "inputs", inputs.size(), root == getRank() ? getSize() : 0);
    for (const auto& input : inputs) check_alike("scatter", input, outputs[0]);
  };
  const auto run = [this, root = options.rootRank, timeout = options.timeout](const Tensors& to,
                                                                              const Tensors& from) {
    const Tensors whole = contiguous(to, false);
    collectives_.scatter(whole[0], contiguous(from, true), static_cast<int>(root), timeout);
    bring_back(whole, to);
  };
  return enqueue({c10d::OpType::SCATTER, "scatter", outputs, first_of(inputs), options.timeout, check, run});
}

NodesBackend::Work NodesBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  const auto check = [this, output, input, reduce = options.reduceOp] {
    check_parts("reduce_scatter", input, output, getSize());
    check_reduction("reduce_scatter", input.scalar_type(), reduce);
  };
  const auto run = [this, reduce = options.reduceOp, timeout = options.timeout](const Tensors& to,
                                                                                const Tensors& from) {
    collectives_.reduce_scatter(from[0], to[0], reduce, timeout);
  };
  return enqueue(
      {c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {output}, {input}, options.timeout, check, run});
}

NodesBackend::Work NodesBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  const auto check = [this, outputs, inputs = first_of(inputs), reduce = options.reduceOp] {
    check_one("reduce_scatter", outputs.size());
    check_layout("reduce_scatter", outputs[0]);
    check_count("reduce_scatter", "inputs", inputs.size(), getSize());
    check_reduction("reduce_scatter", outputs[0].scalar_type(), reduce);
    for (const auto& input : inputs) check_alike("reduce_scatter", input, outputs[0]);
  };
  const auto run = [this, reduce = options.reduceOp, timeout = options.timeout](const Tensors& to,
                                                                                const Tensors& from) {
    Tensors rows;
    for (const auto& input : from) rows.push_back(input.reshape(-1));
    const at::Tensor own = at::empty({to[0].numel()}, to[0].options());
    collectives_.reduce_scatter(at::cat(rows), own, reduce, timeout);
    at::Tensor(to[0]).copy_(own.view(to[0].sizes()));
  };
  return enqueue({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs, first_of(inputs), options.timeout,
                  check, run});
}

NodesBackend::Work NodesBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  const auto check = [this, output, input, output_splits, input_splits] {
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ",
                      output.scalar_type(), ", the input ", input.scalar_type());
    bytes_of_parts("output", output, output_splits, getSize());
    bytes_of_parts("input", input, input_splits, getSize());
  };
  const auto run = [this, output_splits, input_splits, timeout = options.timeout](const Tensors& to,
                                                                                  const Tensors& from) {
    const auto cut = [this](const char* what, const at::Tensor& tensor, const std::vector<int64_t>& splits) {
      auto lengths = bytes_of_parts(what, tensor, splits, getSize());
      for (auto& length : lengths) length /= tensor.element_size();
      return tensor.view(-1).split_with_sizes(lengths);
    };
    collectives_.all_to_all(cut("output", to[0], output_splits), cut("input", from[0], input_splits),
                            timeout);
  };
  return enqueue({c10d::OpType::ALLTOALL_BASE, "all_to_all", {output}, {input}, options.timeout, check, run});
}

NodesBackend::Work NodesBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& options) {
  const auto check = [this, outputs, inputs] { check_all_to_all(outputs, inputs, getSize()); };
  const auto run = [this, timeout = options.timeout](const Tensors& to, const Tensors& from) {
    const Tensors received = contiguous(to, false);
    collectives_.all_to_all(received, contiguous(from, true), timeout);
    bring_back(received, to);
  };
  return enqueue({c10d::OpType::ALLTOALL, "all_to_all", outputs, inputs, options.timeout, check, run});
}

NodesBackend::Work NodesBackend::barrier(const c10d::BarrierOptions& options) {
  const auto run = [this, timeout = options.timeout](const Tensors&, const Tensors&) {
    collectives_.barrier(timeout);
  };
  return enqueue({c10d::OpType::BARRIER, "barrier", {}, {}, options.timeout, [] {}, run});
}

NodesBackend::Work NodesBackend::message(const char* name, Tensors& tensors, int other, int tag, bool sends) {
  constexpr int kAbove = NodesCollectives::kDeviceTag;
  TORCH_CHECK_VALUE(tag >= 0 && tag < kAbove, name, ": tag ", tag, " is not from 0 to ", kAbove - 1,
                    ", which staged over several machines takes");
  check_root(name, other);
  const auto [by, rank] = collectives_.peer(other);
  const c10::Device device = device_of(tensors);
  if (device.is_cpu() || collectives_.here(other))
    return sends ? by->send(tensors, rank, tag) : by->recv(tensors, rank, tag);
  for (const auto& tensor : tensors) check_layout(name, tensor);
  Line* line = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& found = lines_[{other, sends}];
    if (!found) found = std::make_unique<Line>(device);
    line = found.get();
  }
  check_same_device(line->passage, device);
  const auto type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
  const auto run = [this, by = by, line, other, sends](const Tensors& to, const Tensors& from) {
    Tensors list = sends ? from : to;
    line->wait_for(collectives_, other,
                   sends ? by->send(list, other, kAbove) : by->recv(list, other, kAbove));
  };
  return line->passage.queue(line->worker, getRank(), type, tensors, sends ? Tensors{} : tensors,
                             sends ? tensors : Tensors{}, run);
}

NodesBackend::Work NodesBackend::send(Tensors& tensors, int to, int tag) {
  return message("send", tensors, to, tag, true);
}

NodesBackend::Work NodesBackend::recv(Tensors& tensors, int from, int tag) {
  return message("recv", tensors, from, tag, false);
}

NodesBackend::Work NodesBackend::recvAnysource(Tensors&, int) {
  TORCH_CHECK_VALUE(false, "staged over several machines does not receive from any rank; name the rank");
}

}  // namespace oases
