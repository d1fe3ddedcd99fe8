#include "staged_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <numeric>

#include "join_thread.h"
#include "staged_tensors.h"

namespace oases {

using namespace staged;

StagedBackend::StagedBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             std::chrono::milliseconds timeout, std::vector<int64_t> names)
    : Backend(rank, size),
      ranks_(std::make_shared<SharedRanks>(store, rank, size, timeout, std::move(names))),
      collectives_(ranks_),
      timeout_(timeout) {
  thread_ = std::thread([this] { serve(); });
}

StagedBackend::~StagedBackend() {
  if (getpid() != process_) {  // a fork has none of the threads, and what they wait on cannot end there
    thread_.detach();
    static_cast<void>(changed_.release());
    static_cast<void>(new std::deque<Job>(std::move(queue_)));
    static_cast<void>(mail_.release());
    static_cast<void>(streams_.release());
    for (auto& [_, streams] : message_streams_) static_cast<void>(streams.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_->notify_all();
  join_thread(thread_);
}

void StagedBackend::check_process(const char* name) const {
  TORCH_CHECK(
      getpid() == process_, "staged: ", name,
      " was called in a fork of the process that created its process group, whose memory and threads a "
      "fork does not have; start processes by spawn, or create the group after the fork");
}

void StagedBackend::abort() {
  ranks_->break_group(c10::str("staged: rank ", ranks_->name(getRank()), " aborted the group"));
}

std::chrono::milliseconds StagedBackend::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

StagedStreams& StagedBackend::made(const char* name, std::unique_ptr<StagedStreams>& streams,
                                   const std::function<std::unique_ptr<StagedStreams>()>& make) {
  try {
    if (!streams) streams = make();
  } catch (const std::exception& error) {
    // The other ranks queue what this one cannot, and would learn of that at their timeout.
    ranks_->break_group(c10::str(name, ": rank ", getRank(), " failed: ", reason_of(error)));
    throw;
  }
  return *streams;
}

StagedStreams& StagedBackend::streams(const char* name, c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return made(name, streams_, [&] {
    std::vector<int> all(getSize());
    std::iota(all.begin(), all.end(), 0);
    DeviceArea area(ranks_->device_area(), std::move(all), DeviceArea::kAllSlots);
    return std::make_unique<StagedStreams>(ranks_, device, std::move(area), 3);
  });
}

StagedBackend::Work StagedBackend::enqueue(c10d::OpType type, const char* name, How how, Tensors outputs,
                                           const Tensors& used, Run run) {
  check_process(name);
  ++started_;
  const auto found =
      std::find_if(used.begin(), used.end(), [](const auto& tensor) { return !tensor.is_cpu(); });
  if (found != used.end()) {
    StagedStreams& by = streams(name, found->device());
    const Patience patience(name, timeout_or_default(how.timeout));
    return by.queue(type, std::move(outputs), used, patience, [&] {
      TORCH_CHECK_VALUE(by.device() == found->device(), "staged: rank ", getRank(),
                        " gave this group a tensor on ", by.device(), " before, and now one on ",
                        found->device(), "; keep to one device, or make a group for each");
      for (const auto& tensor : used) check_on_device(name, tensor, by.device());
      run(by, patience);
    });
  }
  auto work = c10::make_intrusive<LocalWork>(getRank(), type, std::move(outputs));
  const auto job = [run = std::move(run), name, timeout = timeout_or_default(how.timeout), this](bool idle) {
    const at::AutoDispatchBelowADInplaceOrView below;  // as in worker.h
    ranks_->check_whole();
    const Patience patience(name, timeout, idle);
    const uint32_t turn = collectives_.turn();
    try {
      run(collectives_, patience);
    } catch (const std::exception& error) {
      if (collectives_.turn() != turn) throw;
      // The other ranks join: left out, this call would pair their next one with this rank's.
      collectives_.refuse(reason_of(error), patience);
    }
  };
  std::unique_lock<std::mutex> lock(mutex_);
  if (how.async || busy_ || !queue_.empty()) {
    queue_.push_back({work, job});
    lock.unlock();
    changed_->notify_all();
    return work;
  }
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    job(true);
  } catch (...) {
    error = std::current_exception();  // rethrown by the wait that follows
  }
  lock.lock();
  busy_ = false;
  const bool queued = !queue_.empty();
  lock.unlock();
  if (queued) changed_->notify_all();
  work->end(error);
  return work;
}

void StagedBackend::serve() {
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_->wait(lock, [this] { return !busy_ && (closing_ || !queue_.empty()); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      job.run(false);
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

void StagedBackend::check_root(const char* name, int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < getSize(), name, ": no rank ", root, " in a group of ", getSize());
}

StagedBackend::Work StagedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return enqueue(
      c10d::OpType::BROADCAST, "broadcast", How(options), tensors, tensors,
      [this, tensors, root = options.rootRank](Collectives& collectives, const Patience& patience) {
        check_one("broadcast", tensors.size());
        check_dense("broadcast", tensors[0]);
        check_root("broadcast", root);
        collectives.broadcast(data_of(tensors[0]), size_of(tensors[0]), tensors[0].scalar_type(),
                              static_cast<int>(root), patience);
      });
}

void StagedBackend::reduce_all(Collectives& collectives, const char* name, const Tensors& tensors,
                               ReduceType reduce, int64_t root, const Patience& patience) {
  for (const auto& tensor : tensors) {
    check_dense(name, tensor);
    check_reduction(name, tensor.scalar_type(), reduce);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    collectives.followed_by(static_cast<int64_t>(tensors.size() - 1 - i));
    collectives.all_reduce(data_of(tensors[i]), tensors[i].numel(), tensors[i].scalar_type(), reduce,
                           static_cast<int>(root), patience);
  }
}

StagedBackend::Work StagedBackend::allreduce_coalesced(Tensors& tensors,
                                                       const c10d::AllreduceCoalescedOptions& options) {
  return enqueue(
      c10d::OpType::ALLREDUCE, "all_reduce", How(options), tensors, tensors,
      [this, tensors, reduce = options.reduceOp](Collectives& collectives, const Patience& patience) {
        reduce_all(collectives, "all_reduce", tensors, reduce, -1, patience);
      });
}

StagedBackend::Work StagedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce_coalesced(tensors, {options});
}

StagedBackend::Work StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return enqueue(c10d::OpType::REDUCE, "reduce", How(options), tensors, tensors,
                 [this, tensors, reduce = options.reduceOp, root = options.rootRank](
                     Collectives& collectives, const Patience& patience) {
                   check_one("reduce", tensors.size());
                   check_root("reduce", root);
                   reduce_all(collectives, "reduce", tensors, reduce, root, patience);
                 });
}

void StagedBackend::gather_tensors(Collectives& collectives, const char* name, const Tensors& targets,
                                   const Tensors& inputs, int root, const Patience& patience) {
  check_one(name, inputs.size());
  check_layout(name, inputs[0]);
  for (const auto& target : targets) check_alike(name, target, inputs[0]);
  const Tensors from = contiguous(inputs, true);
  const Tensors to = contiguous(targets, false);
  collectives.all_gather(data_of(from[0]), pointers_of<Targets>(to), size_of(from[0]), from[0].scalar_type(),
                         root, patience);
  bring_back(to, targets);
}

StagedBackend::Work StagedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  const Tensors targets = first_of(outputs);
  return enqueue(c10d::OpType::ALLGATHER, "all_gather", How(options), targets, joined(targets, inputs),
                 [this, targets, inputs](Collectives& collectives, const Patience& patience) {
                   check_count("all_gather", "outputs", targets.size(), getSize());
                   gather_tensors(collectives, "all_gather", targets, inputs, -1, patience);
                 });
}

StagedBackend::Work StagedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::GatherOptions& options) {
  const Tensors targets = first_of(outputs);
  return enqueue(
      c10d::OpType::GATHER, "gather", How(options), targets, joined(targets, inputs),
      [this, targets, inputs, root = options.rootRank](Collectives& collectives, const Patience& patience) {
        check_root("gather", root);
        check_count("gather", "outputs", targets.size(), root == getRank() ? getSize() : 0);
        gather_tensors(collectives, "gather", targets, inputs, static_cast<int>(root), patience);
      });
}

StagedBackend::Work StagedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

StagedBackend::Work StagedBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                   const c10d::AllgatherOptions& options) {
  return enqueue(c10d::OpType::_ALLGATHER_BASE, "all_gather", How(options), outputs, joined(outputs, inputs),
                 [this, outputs, inputs](Collectives& collectives, const Patience& patience) {
                   check_count("all_gather", "inputs", inputs.size(), static_cast<int64_t>(outputs.size()));
                   for (size_t i = 0; i < inputs.size(); ++i)
                     check_parts("all_gather", outputs[i], inputs[i], getSize());
                   for (size_t i = 0; i < inputs.size(); ++i) {
                     collectives.followed_by(static_cast<int64_t>(inputs.size() - 1 - i));
                     collectives.all_gather(data_of(inputs[i]), parts_of<Targets>(outputs[i], getSize()),
                                            size_of(inputs[i]), inputs[i].scalar_type(), -1, patience);
                   }
                 });
}

StagedBackend::Work StagedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                           const c10d::ScatterOptions& options) {
  return enqueue(c10d::OpType::SCATTER, "scatter", How(options), outputs, joined(outputs, first_of(inputs)),
                 [this, sources = first_of(inputs), outputs, root = options.rootRank](
                     Collectives& collectives, const Patience& patience) {
                   check_one("scatter", outputs.size());
                   check_layout("scatter", outputs[0]);
                   check_root("scatter", root);
                   check_count("scatter", "inputs", sources.size(), root == getRank() ? getSize() : 0);
                   for (const auto& source : sources) check_alike("scatter", source, outputs[0]);
                   const Tensors from = contiguous(sources, true), to = contiguous(outputs, false);
                   collectives.scatter(pointers_of<Sources>(from), data_of(to[0]), size_of(to[0]),
                                       to[0].scalar_type(), static_cast<int>(root), patience);
                   bring_back(to, outputs);
                 });
}

StagedBackend::Work StagedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                  const c10d::ReduceScatterOptions& options) {
  return enqueue(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", How(options), outputs,
                 joined(outputs, first_of(inputs)),
                 [this, sources = first_of(inputs), outputs, reduce = options.reduceOp](
                     Collectives& collectives, const Patience& patience) {
                   check_one("reduce_scatter", outputs.size());
                   check_layout("reduce_scatter", outputs[0]);
                   check_reduction("reduce_scatter", outputs[0].scalar_type(), reduce);
                   check_count("reduce_scatter", "inputs", sources.size(), getSize());
                   for (const auto& source : sources) check_alike("reduce_scatter", source, outputs[0]);
                   const Tensors from = contiguous(sources, true), to = contiguous(outputs, false);
                   collectives.reduce_scatter(pointers_of<Sources>(from), data_of(to[0]), to[0].numel(),
                                              to[0].scalar_type(), reduce, patience);
                   bring_back(to, outputs);
                 });
}

StagedBackend::Work StagedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

StagedBackend::Work StagedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return enqueue(
      c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", How(options), outputs, joined(outputs, inputs),
      [this, outputs, inputs, reduce = options.reduceOp](Collectives& collectives, const Patience& patience) {
        check_count("reduce_scatter", "inputs", inputs.size(), static_cast<int64_t>(outputs.size()));
        for (size_t i = 0; i < inputs.size(); ++i) {
          check_parts("reduce_scatter", inputs[i], outputs[i], getSize());
          check_reduction("reduce_scatter", outputs[i].scalar_type(), reduce);
        }
        for (size_t i = 0; i < inputs.size(); ++i) {
          collectives.followed_by(static_cast<int64_t>(inputs.size() - 1 - i));
          collectives.reduce_scatter(parts_of<Sources>(inputs[i], getSize()), data_of(outputs[i]),
                                     outputs[i].numel(), outputs[i].scalar_type(), reduce, patience);
        }
      });
}

StagedBackend::Work StagedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<int64_t>& output_splits,
                                                 std::vector<int64_t>& input_splits,
                                                 const c10d::AllToAllOptions& options) {
  return enqueue(
      c10d::OpType::ALLTOALL_BASE, "all_to_all", How(options), {output}, {output, input},
      [this, output, input, output_splits, input_splits](Collectives& collectives, const Patience& patience) {
        TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ",
                          output.scalar_type(), ", the input ", input.scalar_type());
        const auto received = bytes_of_parts("output", output, output_splits, getSize());
        const auto sent = bytes_of_parts("input", input, input_splits, getSize());
        Sources sources;
        Targets targets;
        std::byte *from = data_of(input), *to = data_of(output);
        for (int rank = 0; rank < getSize(); ++rank) {
          sources.push_back(from), targets.push_back(to);
          from += sent[rank], to += received[rank];
        }
        collectives.all_to_all(sources, sent, targets, received, input.scalar_type(), patience);
      });
}

StagedBackend::Work StagedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllToAllOptions& options) {
  return enqueue(c10d::OpType::ALLTOALL, "all_to_all", How(options), outputs, joined(outputs, inputs),
                 [this, outputs, inputs](Collectives& collectives, const Patience& patience) {
                   check_all_to_all(outputs, inputs, getSize());
                   std::vector<int64_t> sent, received;
                   for (const auto& input : inputs) sent.push_back(size_of(input));
                   for (const auto& output : outputs) received.push_back(size_of(output));
                   const Tensors from = contiguous(inputs, true), to = contiguous(outputs, false);
                   collectives.all_to_all(pointers_of<Sources>(from), sent, pointers_of<Targets>(to),
                                          received, inputs[0].scalar_type(), patience);
                   bring_back(to, outputs);
                 });
}

StagedBackend::Work StagedBackend::refuse(const char* name, const std::string& reason,
                                          std::chrono::milliseconds timeout) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  options.asyncOp = false;
  return enqueue(c10d::OpType::UNKNOWN, name, How(options), {}, {},
                 [reason](Collectives&, const Patience&) { TORCH_CHECK_VALUE(false, reason); });
}

StagedBackend::Work StagedBackend::barrier(const c10d::BarrierOptions& options) {
  return enqueue(c10d::OpType::BARRIER, "barrier", How(options), {}, {},
                 [this](Collectives&, const Patience& patience) { collectives_.barrier(patience); });
}

}  // namespace oases
