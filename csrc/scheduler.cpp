#include "scheduler.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "local_work.h"
#include "quantize_kernels.h"
#include "quantized_backend.h"

// torch 2.13 renames the two _base collectives; 2.11 and 2.12 know only these names.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace oases {

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {
void record_event(std::optional<c10::Event>& event, c10::Device device) {
  event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // this flag keeps the time
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}
}  // namespace

namespace {
// NCCL's wait() then holds the host until the collective has ended, and a scheduler waits for each as soon as it has
// started it, on a stream aside (record_end).
void refuse_blocking_waits() {
  for (const char* const name : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
    const char* const set = std::getenv(name);
    if (set != nullptr && std::string("1yYtT").find(set[0]) != std::string::npos)
      TORCH_CHECK_VALUE(
          false, name, "=", set,
          " makes the host wait for every collective, and nothing would overlap with one; unset it");
  }
}

// The failure that halted this process.
struct Halt {
  std::atomic<bool> on{false};
  std::mutex mutex;  // guards what follows
  std::string failure;
  bool out_of_memory = false;
};

Halt& halted() {
  static auto* const found = new Halt();  // never destroyed, like the schedulers
  return *found;
}
}  // namespace

struct Ticket::Finish {
  std::atomic<double> at{0.0};
};

TicketRecord Ticket::record() const {
  TicketRecord record = record_;
  record.finished = finish_->at.load();
  return record;
}

OverlapScheduler::OverlapScheduler(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : OverlapScheduler(group->getGroupName(), group->getRank(), group->getSize()) {
  group_ = group;
}

OverlapScheduler::OverlapScheduler(std::string name, int rank, int size)
    : name_(std::move(name)), rank_(rank), size_(size) {}

namespace {
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<OverlapScheduler>> by_group;
};

Shared& shared() {
  // Never destroyed: a scheduler may be asked for while the interpreter is shutting down.
  static auto* const found = new Shared();
  return *found;
}
}  // namespace

std::shared_ptr<OverlapScheduler> OverlapScheduler::of(const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  std::shared_ptr<OverlapScheduler> ended;  // freed without the lock
  const std::lock_guard<std::mutex> lock(shared().mutex);
  auto& scheduler = shared().by_group[group_name];
  // The name of a destroyed group may have been reused.
  if (!scheduler || scheduler->rank_ != group->getRank() || scheduler->size_ != group->getSize()) {
    ended.swap(scheduler);
    scheduler.reset(new OverlapScheduler(group_name, group->getRank(), group->getSize()));
  }
  return scheduler;
}

std::map<std::string, std::shared_ptr<OverlapScheduler>> OverlapScheduler::all() {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  auto found = shared().by_group;
  for (auto it = found.begin(); it != found.end();) {
    try {
      c10d::resolve_process_group(it->first);
      ++it;
    } catch (const c10::Error&) {  // destroyed
      it = found.erase(it);
    }
  }
  return found;
}

c10::intrusive_ptr<c10d::ProcessGroup> OverlapScheduler::group(const std::string& wire,
                                                               const std::string& label,
                                                               c10::DeviceType device) const {
  if (wire.empty() && code_.empty()) return group_ ? group_ : c10d::resolve_process_group(name_);
  const auto found = c10d::resolve_process_group(wire.empty() ? name_ : wires_.at(wire));
  const auto types = found->getDeviceTypes();
  TORCH_CHECK_VALUE(
      std::any_of(types.begin(), types.end(), [&](const c10::Device& each) { return each.type() == device; }),
      "group '", name_, "' sends no quantised numbers of tensors on ", device,
      "; leave out the wire dtype, or make the group with a backend of which another can be made, such as "
      "gloo for ",
      "the CPU and nccl for CUDA");
  auto* const quantized = dynamic_cast<QuantizedBackend*>(found->getBackend(device).get());
  if (quantized) quantized->set_label(label);
  return found;
}

void OverlapScheduler::add_wire(const std::string& wire, const std::string& group_name) {
  const auto other = c10d::resolve_process_group(group_name);
  TORCH_CHECK_VALUE(other->getRank() == rank_ && other->getSize() == size_, "group '", group_name,
                    "' for the wire ", wire, " is not of the ranks of group '", name_, "'");
  wires_[wire] = group_name;
  of(group_name)->code_ = wire;
}

std::shared_ptr<Ticket> OverlapScheduler::issue(const std::string& operation, const std::string& wire,
                                                const at::Tensor& counted, std::vector<at::Tensor> tensors,
                                                const std::string& label, const Start& start,
                                                bool even_empty) {
  const std::string collective = wire.empty() ? operation : operation + ":" + wire;
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.is_contiguous(), collective, " of ", label, ": the tensor of shape ", tensor.sizes(),
                " and strides ", tensor.strides(), " is not contiguous; call .contiguous() first");
  auto ticket = std::make_shared<Ticket>();
  ticket->finish_ = std::make_shared<Ticket::Finish>();
  ticket->record_.collective = collective;
  ticket->record_.label = label;
  const bool quantised = !wire.empty() || !code_.empty();
  const int64_t whole = counted.numel() * counted.element_size();
  ticket->record_.bytes = quantised ? packed_bytes(counted.numel()) : whole;
  ticket->record_.saved_bytes = whole - ticket->record_.bytes;
  ticket->tensors_ = std::move(tensors);
  ticket->record_.issued = monotonic_seconds();
  if (size_ == 1 || (counted.numel() == 0 && !even_empty)) {
    ticket->finish_->at = ticket->record_.issued;
    return ticket;
  }
  TORCH_CHECK(
      getpid() == process_, collective, " of ", label,
      " was called in a fork of the process that created its process group, whose connections and threads a "
      "fork does not have; start processes by spawn, or create the group after the fork");
  if (!counted.is_cpu()) {
    refuse_blocking_waits();
    record_event(ticket->at_issue_, counted.device());
  }
  if (halted().on) stop(c10::str(collective, " of ", label));
  ticket->work_ = start(*ticket);
  TORCH_CHECK(ticket->work_, collective, " of ", label, ": the backend of group '", name_,
              "' returned no work to wait for");
  if (ticket->at_issue_) record_end(*ticket);
  // Tickets that an exception left without a wait are released once they have finished.
  while (!in_flight_.empty() && in_flight_.front().use_count() == 1 &&
         in_flight_.front()->work_->isCompleted())
    in_flight_.pop_front();
  in_flight_.push_back(ticket);
  if (counted.is_cpu()) {
    try {
      ticket->work_->getFuture()->addCallback(
          [finish = ticket->finish_](c10::ivalue::Future&) { finish->at = monotonic_seconds(); });
    } catch (const c10::Error&) {
      // Work::getFuture is optional in c10d: see TicketRecord::finished.
    }
  }
  return ticket;
}

// On a stream on which nothing else is queued: the event of the compute stream's wait says when that came to it.
void OverlapScheduler::record_end(Ticket& ticket) {
  const c10::Device device = ticket.tensors_.front().device();
  if (!aside_ || aside_->device() != device)
    aside_ = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  const c10::StreamGuard on(*aside_);
  ticket.work_->wait();
  record_event(ticket.end_, device);
}

std::shared_ptr<Ticket> OverlapScheduler::all_reduce(const at::Tensor& tensor, const std::string& label,
                                                     bool largest, const std::string& wire,
                                                     const std::optional<at::Tensor>& residual) {
  std::vector<at::Tensor> tensors{tensor};
  if (residual) {
    TORCH_CHECK_VALUE(!wire.empty(), "all_reduce of ", label, ": only a sum on a wire has a residual");
    tensors.push_back(*residual);
  }
  return issue(largest ? "all_reduce_max" : "all_reduce", wire, tensor, tensors, label, [&](Ticket&) {
    c10d::AllreduceOptions options;
    if (largest) options.reduceOp = c10d::ReduceOp::MAX;
    return group(wire, label, tensor.device().type())->allreduce(tensors, options);
  });
}

std::shared_ptr<Ticket> OverlapScheduler::all_gather(const at::Tensor& output, const at::Tensor& input,
                                                     const std::string& label, const std::string& wire) {
  TORCH_CHECK(output.numel() == input.numel() * size_, "all_gather of ", label, ": the output holds ",
              output.numel(), " elements, not group size ", size_, " x input ", input.numel());
  auto ticket = issue("all_gather", wire, output, {output, input}, label, [&](Ticket&) {
    at::Tensor whole = output.view(-1),
               part = input.view(-1);  // gloo requires equal shapes
    return group(wire, label, input.device().type())->_allgather_base(whole, part);
  });
  if (!ticket->work_ && input.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

std::shared_ptr<Ticket> OverlapScheduler::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                         const std::string& label, const std::string& wire) {
  TORCH_CHECK(input.numel() == output.numel() * size_, "reduce_scatter of ", label, ": the input holds ",
              input.numel(), " elements, not group size ", size_, " x output ", output.numel());
  auto ticket = issue("reduce_scatter", wire, input, {output, input}, label, [&](Ticket& ticket) {
    return start_reduce_scatter(ticket, output, input, wire, label);
  });
  if (!ticket->work_ && output.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

// Gloo sums a copy of the whole tensor and takes its part of that in the wait, whose work does not tell when the sum
// has ended. So the copy is made here, and its all-reduce tells.
c10::intrusive_ptr<c10d::Work> OverlapScheduler::start_reduce_scatter(Ticket& ticket, at::Tensor output,
                                                                      at::Tensor input,
                                                                      const std::string& wire,
                                                                      const std::string& label) {
  output = output.view(-1), input = input.view(-1);
  const auto by = group(wire, label, input.device().type());
  if (!input.is_cpu() || by->getBackend(c10::DeviceType::CPU)->getBackendName() != "gloo")
    return by->_reduce_scatter_base(output, input);
  std::vector<at::Tensor> whole{input.clone()};
  ticket.part_.emplace(output, whole.front().narrow(0, rank_ * output.numel(), output.numel()));
  return by->allreduce(whole);
}

std::shared_ptr<Ticket> OverlapScheduler::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                                     const std::vector<int64_t>& sent,
                                                     const std::vector<int64_t>& received,
                                                     const std::string& label, const std::string& wire) {
  // Convert rows to elements: backends then need not agree on the shape of a row.
  const auto numbers = [&](const char* what, const at::Tensor& tensor, const std::vector<int64_t>& rows) {
    TORCH_CHECK(tensor.dim() > 0 && static_cast<int>(rows.size()) == size_, "all_to_all of ", label, ": the ",
                what, " of shape ", tensor.sizes(), " goes with ", rows.size(), " row counts, not one for ",
                "each of ", size_, " ranks");
    const int64_t row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
    int64_t total = 0;
    std::vector<int64_t> elements;
    for (const int64_t count : rows) {
      TORCH_CHECK(count >= 0, "all_to_all of ", label, ": ", count, " rows of the ", what);
      total += count;
      elements.push_back(count * row);
    }
    TORCH_CHECK(total == tensor.size(0), "all_to_all of ", label, ": the ", what, " has ", tensor.size(0),
                " rows, not the ", total, " that its splits sum up to");
    return elements;
  };
  const Splits splits{numbers("input", input, sent), numbers("output", output, received)};
  TORCH_CHECK(output.scalar_type() == input.scalar_type() && output.device() == input.device(),
              "all_to_all of ", label, ": the output is ", output.scalar_type(), " on ", output.device(),
              ", the input ", input.scalar_type(), " on ", input.device());
  TORCH_CHECK(splits.sent[rank_] == splits.received[rank_], "all_to_all of ", label, ": rank ", rank_,
              " sends itself ", sent[rank_], " rows but receives ", received[rank_]);
  auto ticket = issue(
      "all_to_all", wire, input, {output, input}, label,
      [&](Ticket&) { return start_all_to_all(output, input, splits, wire, label); }, true);
  if (!ticket->work_ && input.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

c10::intrusive_ptr<c10d::Work> OverlapScheduler::start_all_to_all(at::Tensor output, at::Tensor input,
                                                                  Splits numbers, const std::string& wire,
                                                                  const std::string& label) {
  output = output.view(-1), input = input.view(-1);
  return group(wire, label, input.device().type())
      ->alltoall_base(output, input, numbers.received, numbers.sent);
}

void OverlapScheduler::halt(const std::string& failure, bool out_of_memory) {
  const std::lock_guard<std::mutex> lock(halted().mutex);
  if (halted().on) return;
  halted().failure = failure;
  halted().out_of_memory = out_of_memory;
  halted().on = true;
}

void OverlapScheduler::go_on() { halted().on = false; }

void OverlapScheduler::stop(const std::string& at) {
  in_flight_.clear();
  {
    const std::lock_guard<std::mutex> waiting(mutex_);
    waiting_for_.clear();
  }
  const std::lock_guard<std::mutex> lock(halted().mutex);
  const std::string message = c10::str("rank ", rank_, " stopped at ", at, ": ", halted().failure);
  TORCH_CHECK_WITH(OutOfMemoryError, !halted().out_of_memory, message);
  TORCH_CHECK_WITH(DistBackendError, false, message);
}

// Waits, and looks now and then whether a rank has failed: gloo has no abort that would end the wait.
void OverlapScheduler::wait_on_host(c10d::Work& work) {
  constexpr std::chrono::milliseconds look_up{250};
  while (!halted().on) {
    const double before = monotonic_seconds();
    try {
      work.wait(look_up);
      return;
    } catch (const std::exception&) {
      // Timed out or failed? Not every work can report completion, but waiting again can.
      if (monotonic_seconds() - before < 0.9e-3 * look_up.count()) throw;
      if (work.isCompleted()) {  // perhaps since the time-out
        work.wait();
        return;
      }
    }
  }
}

void OverlapScheduler::wait(const std::shared_ptr<Ticket>& ticket) {
  TicketRecord& record = ticket->record_;
  TORCH_CHECK(!ticket->waited_, record.collective, " of ", record.label,
              " was waited for already; wait once per ticket");
  ticket->waited_ = true;
  record.waited_from = monotonic_seconds();
  const bool on_cpu = ticket->tensors_.front().is_cpu();
  if (ticket->work_) {
    const std::string name = described(record);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_for_ = name;
    }
    const auto device = ticket->tensors_.front().device();
    if (!on_cpu) record_event(ticket->before_wait_, device);
    try {
      on_cpu ? wait_on_host(*ticket->work_) : static_cast<void>(ticket->work_->wait());
    } catch (const std::exception& error) {
      if (halted().on) stop(name);
      // waiting_for_ stays set: it is what the run died of.
      TORCH_CHECK_WITH(DistBackendError, false, "rank ", rank_, " waited for ", name,
                       ", which failed: ", error.what());
    }
    if (!on_cpu) record_event(ticket->after_wait_, device);
    if (halted().on) stop(name);  // an abort may have ended it
    const auto place = std::find(in_flight_.begin(), in_flight_.end(), ticket);
    if (place != in_flight_.end()) in_flight_.erase(place);
  }
  if (ticket->part_) ticket->part_->first.copy_(ticket->part_->second);
  ticket->part_.reset();
  const c10::intrusive_ptr<c10d::Work> work = ticket->work_;
  // Not c10's cast of the pointer itself, which keeps a work of another class forever.
  const auto* const judged = dynamic_cast<const Judgement*>(work.get());
  if (judged && judged->exempt) {
    const int64_t whole = record.bytes + record.saved_bytes;
    record.bytes = whole / ticket->tensors_.front().element_size() * 2;
    record.saved_bytes = whole - record.bytes;
  }
  record.blocked_for = monotonic_seconds() - record.waited_from;
  if (ticket->finish_->at == 0.0) ticket->finish_->at = monotonic_seconds();
  ticket->work_.reset();
  ticket->tensors_.clear();
  if (judged) note_error(*judged, record.label);
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_for_.clear();
  if (!ticket->after_wait_) {
    const TicketRecord done = ticket->record();
    return account(done, done.issued, done.finished, link_free_from_);
  }
  unsettled_.push_back(ticket);
  // Those that have ended, without a wait: otherwise events would gather until somebody asks for totals.
  while (!unsettled_.empty() && unsettled_.front()->after_wait_->query() && unsettled_.front()->end_->query())
    settle_first();
}

std::string OverlapScheduler::waiting_for() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!waiting_for_.empty()) return waiting_for_;
  // An accelerator's host has passed its waits: what its compute stream has come to.
  for (const auto& ticket : unsettled_)
    if (ticket->before_wait_->query() && !ticket->end_->query()) return described(ticket->record_);
  return "";
}

std::string OverlapScheduler::described(const TicketRecord& record) const {
  return c10::str(record.collective, " of ", record.label.empty() ? "?" : record.label, " (", record.bytes,
                  " bytes, group '", name_, "' of ", size_, ")");
}

void OverlapScheduler::renew() {
  in_flight_.clear();
  wires_.clear();
  errors_.clear();
  exempted_.clear();
}

}  // namespace oases
