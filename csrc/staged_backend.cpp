#include "staged_backend.h"

#include <numeric>

#include "staged_tensors.h"

namespace oases {

using namespace staged;

StagedBackend::StagedBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             std::chrono::milliseconds timeout)
    : Backend(rank, size),
      ranks_(std::make_shared<SharedRanks>(store, rank, size, timeout)),
      collectives_(ranks_),
      timeout_(timeout) {
  thread_ = std::thread([this] { serve(); });
}

StagedBackend::~StagedBackend() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StagedBackend::abort() {
  ranks_->break_group(c10::str("staged: rank ", getRank(), " aborted the group"));
}

std::chrono::milliseconds StagedBackend::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

StagedBackend::Work StagedBackend::enqueue(c10d::OpType type, const char* name, How how, Tensors outputs,
                                           std::function<void(const Patience&)> run) {
  auto work = c10::make_intrusive<LocalWork>(getRank(), type, std::move(outputs));
  const auto job = [run = std::move(run), name, timeout = timeout_or_default(how.timeout), this] {
    ranks_->check_whole();
    run(Patience(name, timeout));
  };
  std::unique_lock<std::mutex> lock(mutex_);
  if (how.async || busy_ || !queue_.empty()) {
    queue_.push_back({work, job});
    lock.unlock();
    changed_.notify_all();
    return work;
  }
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    job();
  } catch (...) {
    error = std::current_exception();  // rethrown by the wait that follows
  }
  lock.lock();
  busy_ = false;
  const bool queued = !queue_.empty();
  lock.unlock();
  if (queued) changed_.notify_all();
  work->end(error);
  return work;
}

void StagedBackend::serve() {
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !busy_ && (closing_ || !queue_.empty()); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      job.run();
    } catch (...) {
      error = std::current_exception();  // rethrown to callers that wait
    }
    job.run = nullptr;
    lock.lock();
    busy_ = false;
    lock.unlock();
    job.work->end(error);
  }
}

void StagedBackend::check_root(const char* name, int64_t root, int64_t tensors) const {
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), name, ": no rank ", root, " in a group of ", getSize());
  const int64_t wanted = root == getRank() ? getSize() : 0;
  TORCH_CHECK_VALUE(tensors == wanted, name, ": rank ", getRank(), " gives ", tensors,
                    " tensors for the ranks, not ", wanted, ", with root ", root);
}

StagedBackend::Work StagedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one("broadcast", tensors.size());
  check_dense("broadcast", tensors.front());
  TORCH_CHECK_VALUE(options.rootRank >= 0 && options.rootRank < getSize(), "broadcast: no rank ",
                    options.rootRank, " in a group of ", getSize());
  return enqueue(c10d::OpType::BROADCAST, "broadcast", How(options), tensors,
                 [this, tensor = tensors.front(), root = options.rootRank](const Patience& patience) {
                   collectives_.broadcast(data_of(tensor), size_of(tensor), tensor.scalar_type(),
                                          static_cast<int>(root), patience);
                 });
}

StagedBackend::Work StagedBackend::allreduce_coalesced(Tensors& tensors,
                                                       const c10d::AllreduceCoalescedOptions& options) {
  const ReduceType reduce = options.reduceOp;
  for (const auto& tensor : tensors) {
    check_dense("all_reduce", tensor);
    check_reduction("all_reduce", tensor.scalar_type(), reduce);
  }
  return enqueue(c10d::OpType::ALLREDUCE, "all_reduce", How(options), tensors,
                 [this, tensors, reduce](const Patience& patience) {
                   for (const auto& tensor : tensors)
                     collectives_.all_reduce(data_of(tensor), tensor.numel(), tensor.scalar_type(), reduce,
                                             -1, patience);
                 });
}

StagedBackend::Work StagedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one("all_reduce", tensors.size());
  return allreduce_coalesced(tensors, {options});
}

StagedBackend::Work StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_one("reduce", tensors.size());
  const ReduceType reduce = options.reduceOp;
  check_dense("reduce", tensors.front());
  check_reduction("reduce", tensors.front().scalar_type(), reduce);
  TORCH_CHECK_VALUE(options.rootRank >= 0 && options.rootRank < getSize(), "reduce: no rank ",
                    options.rootRank, " in a group of ", getSize());
  return enqueue(c10d::OpType::REDUCE, "reduce", How(options), tensors,
                 [this, tensor = tensors.front(), reduce, root = options.rootRank](const Patience& patience) {
                   collectives_.all_reduce(data_of(tensor), tensor.numel(), tensor.scalar_type(), reduce,
                                           static_cast<int>(root), patience);
                 });
}

StagedBackend::Work StagedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  check_one("all_gather", inputs.size()), check_one("all_gather", outputs.size());
  const Tensors targets = outputs.front();
  const at::Tensor input = inputs.front();
  check_on_cpu("all_gather", input);
  TORCH_CHECK_VALUE(static_cast<int>(targets.size()) == getSize(), "all_gather: ", targets.size(),
                    " outputs for a group of ", getSize());
  for (const auto& target : targets) check_alike("all_gather", target, input);
  return enqueue(c10d::OpType::ALLGATHER, "all_gather", How(options), targets,
                 [this, targets, input](const Patience& patience) {
                   const at::Tensor from = input.contiguous();
                   const Tensors to = contiguous(targets, false);
                   collectives_.all_gather(data_of(from), pointers_of<Targets>(to), size_of(from),
                                           from.scalar_type(), -1, patience);
                   bring_back(to, targets);
                 });
}

void StagedBackend::gather_parts(const at::Tensor& output, const at::Tensor& input,
                                 const Patience& patience) {
  collectives_.all_gather(data_of(input), parts_of<Targets>(output, getSize()), size_of(input),
                          input.scalar_type(), -1, patience);
}

StagedBackend::Work StagedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) {
  check_parts("all_gather", output, input, getSize());
  return enqueue(c10d::OpType::_ALLGATHER_BASE, "all_gather", How(options), {output},
                 [this, output, input](const Patience& patience) { gather_parts(output, input, patience); });
}

StagedBackend::Work StagedBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather: ", outputs.size(), " outputs, ",
                    inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) check_parts("all_gather", outputs[i], inputs[i], getSize());
  return enqueue(c10d::OpType::COALESCED, "all_gather", How(options), outputs,
                 [this, outputs, inputs](const Patience& patience) {
                   for (size_t i = 0; i < inputs.size(); ++i) gather_parts(outputs[i], inputs[i], patience);
                 });
}

StagedBackend::Work StagedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::GatherOptions& options) {
  check_one("gather", inputs.size());
  const Tensors targets = outputs.empty() ? Tensors{} : outputs.front();
  const at::Tensor input = inputs.front();
  check_on_cpu("gather", input);
  check_root("gather", options.rootRank, static_cast<int64_t>(targets.size()));
  for (const auto& target : targets) check_alike("gather", target, input);
  return enqueue(c10d::OpType::GATHER, "gather", How(options), targets,
                 [this, targets, input, root = options.rootRank](const Patience& patience) {
                   const at::Tensor from = input.contiguous();
                   const Tensors to = contiguous(targets, false);
                   collectives_.all_gather(data_of(from), pointers_of<Targets>(to), size_of(from),
                                           from.scalar_type(), static_cast<int>(root), patience);
                   bring_back(to, targets);
                 });
}

StagedBackend::Work StagedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                           const c10d::ScatterOptions& options) {
  check_one("scatter", outputs.size());
  const Tensors sources = inputs.empty() ? Tensors{} : inputs.front();
  const at::Tensor output = outputs.front();
  check_on_cpu("scatter", output);
  check_root("scatter", options.rootRank, static_cast<int64_t>(sources.size()));
  for (const auto& source : sources) check_alike("scatter", source, output);
  return enqueue(c10d::OpType::SCATTER, "scatter", How(options), outputs,
                 [this, sources, output, root = options.rootRank](const Patience& patience) {
                   const Tensors from = contiguous(sources, true), to = contiguous({output}, false);
                   collectives_.scatter(pointers_of<Sources>(from), data_of(to[0]), size_of(output),
                                        output.scalar_type(), static_cast<int>(root), patience);
                   bring_back(to, {output});
                 });
}

StagedBackend::Work StagedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ReduceScatterOptions& options) {
  check_one("reduce_scatter", outputs.size()), check_one("reduce_scatter", inputs.size());
  const Tensors sources = inputs.front();
  const at::Tensor output = outputs.front();
  const ReduceType reduce = options.reduceOp;
  check_on_cpu("reduce_scatter", output);
  check_reduction("reduce_scatter", output.scalar_type(), reduce);
  TORCH_CHECK_VALUE(static_cast<int>(sources.size()) == getSize(), "reduce_scatter: ", sources.size(),
                    " inputs for a group of ", getSize());
  for (const auto& source : sources) check_alike("reduce_scatter", source, output);
  return enqueue(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", How(options), outputs,
                 [this, sources, output, reduce](const Patience& patience) {
                   const Tensors from = contiguous(sources, true), to = contiguous({output}, false);
                   collectives_.reduce_scatter(pointers_of<Sources>(from), data_of(to[0]), output.numel(),
                                               output.scalar_type(), reduce, patience);
                   bring_back(to, {output});
                 });
}

void StagedBackend::reduce_parts(const at::Tensor& output, const at::Tensor& input, ReduceType reduce,
                                 const Patience& patience) {
  collectives_.reduce_scatter(parts_of<Sources>(input, getSize()), data_of(output), output.numel(),
                              output.scalar_type(), reduce, patience);
}

StagedBackend::Work StagedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

StagedBackend::Work StagedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter: ", outputs.size(), " outputs, ",
                    inputs.size(), " inputs");
  const ReduceType reduce = options.reduceOp;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts("reduce_scatter", inputs[i], outputs[i], getSize());
    check_reduction("reduce_scatter", outputs[i].scalar_type(), reduce);
  }
  return enqueue(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", How(options), outputs,
                 [this, outputs, inputs, reduce](const Patience& patience) {
                   for (size_t i = 0; i < inputs.size(); ++i)
                     reduce_parts(outputs[i], inputs[i], reduce, patience);
                 });
}

StagedBackend::Work StagedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<int64_t>& output_splits,
                                                 std::vector<int64_t>& input_splits,
                                                 const c10d::AllToAllOptions& options) {
  check_contiguous("all_to_all", output), check_contiguous("all_to_all", input);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ",
                    output.scalar_type(), ", the input ", input.scalar_type());
  const auto bytes_of_parts = [this](const char* what, const at::Tensor& tensor,
                                     const std::vector<int64_t>& splits) {
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
    TORCH_CHECK_VALUE(splits.empty() ? rows % getSize() == 0
                                     : static_cast<int>(splits.size()) == getSize() &&
                                           std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
                      "all_to_all: the ", what, " of shape ", tensor.sizes(), " is not cut in ", getSize(),
                      " parts by splits ", splits);
    const int64_t row = rows ? size_of(tensor) / rows : 0;
    std::vector<int64_t> bytes(getSize(), rows / getSize() * row);
    for (size_t i = 0; i < splits.size(); ++i) bytes[i] = splits[i] * row;
    return bytes;
  };
  const auto received = bytes_of_parts("output", output, output_splits);
  const auto sent = bytes_of_parts("input", input, input_splits);
  return enqueue(c10d::OpType::ALLTOALL_BASE, "all_to_all", How(options), {output},
                 [this, output, input, sent, received](const Patience& patience) {
                   Sources sources;
                   Targets targets;
                   std::byte *from = data_of(input), *to = data_of(output);
                   for (int rank = 0; rank < getSize(); ++rank) {
                     sources.push_back(from), targets.push_back(to);
                     from += sent[rank], to += received[rank];
                   }
                   collectives_.all_to_all(sources, sent, targets, received, input.scalar_type(), patience);
                 });
}

StagedBackend::Work StagedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == getSize() && static_cast<int>(inputs.size()) == getSize(),
      "all_to_all: ", outputs.size(), " outputs and ", inputs.size(), " inputs for a group of ", getSize());
  std::vector<int64_t> sent, received;
  for (int rank = 0; rank < getSize(); ++rank) {
    check_on_cpu("all_to_all", inputs[rank]), check_on_cpu("all_to_all", outputs[rank]);
    TORCH_CHECK_VALUE(inputs[rank].scalar_type() == inputs[0].scalar_type() &&
                          outputs[rank].scalar_type() == inputs[0].scalar_type(),
                      "all_to_all: tensors of several types; give one");
    sent.push_back(size_of(inputs[rank])), received.push_back(size_of(outputs[rank]));
  }
  return enqueue(c10d::OpType::ALLTOALL, "all_to_all", How(options), outputs,
                 [this, outputs, inputs, sent, received](const Patience& patience) {
                   const Tensors from = contiguous(inputs, true), to = contiguous(outputs, false);
                   collectives_.all_to_all(pointers_of<Sources>(from), sent, pointers_of<Targets>(to),
                                           received, inputs[0].scalar_type(), patience);
                   bring_back(to, outputs);
                 });
}

StagedBackend::Work StagedBackend::barrier(const c10d::BarrierOptions& options) {
  return enqueue(c10d::OpType::BARRIER, "barrier", How(options), {},
                 [this](const Patience& patience) { collectives_.barrier(patience); });
}

StagedMail& StagedBackend::mail() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!mail_) mail_ = std::make_unique<StagedMail>(ranks_);
  return *mail_;
}

StagedBackend::Work StagedBackend::send(Tensors& tensors, int to, int tag) {
  check_one("send", tensors.size());
  check_dense("send", tensors.front());
  return mail().send(tensors.front(), to, tag, timeout_);
}

StagedBackend::Work StagedBackend::recv(Tensors& tensors, int from, int tag) {
  check_one("recv", tensors.size());
  check_dense("recv", tensors.front());
  return mail().receive(tensors.front(), from, tag, timeout_);
}

StagedBackend::Work StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  check_one("recv", tensors.size());
  check_dense("recv", tensors.front());
  return mail().receive(tensors.front(), StagedMail::kAnyRank, tag, timeout_);
}

}  // namespace oases
