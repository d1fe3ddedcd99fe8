#include "scheduler.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

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
// Collectives after which diverged ranks can be brought together again.
constexpr size_t kRemembered = 1024;
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

std::shared_ptr<OverlapScheduler> OverlapScheduler::of(const std::string& group_name) {
  // Never destroyed: a scheduler may be asked for while the interpreter is shutting down.
  static auto* schedulers = new std::map<std::string, std::shared_ptr<OverlapScheduler>>();
  static auto* mutex = new std::mutex();
  const auto group = c10d::resolve_process_group(group_name);
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& scheduler = (*schedulers)[group_name];
  // The name of a destroyed group may have been reused.
  if (!scheduler || scheduler->rank_ != group->getRank() || scheduler->size_ != group->getSize())
    scheduler.reset(new OverlapScheduler(group_name, group->getRank(), group->getSize()));
  return scheduler;
}

c10::intrusive_ptr<c10d::ProcessGroup> OverlapScheduler::group() const {
  return group_ ? group_ : c10d::resolve_process_group(name_);
}

std::shared_ptr<Ticket> OverlapScheduler::issue(const char* collective, const at::Tensor& counted,
                                                std::vector<at::Tensor> tensors, const std::string& label,
                                                const Start& start, const Splits* splits) {
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.is_contiguous(), collective, " of ", label, ": the tensor of shape ", tensor.sizes(),
                " and strides ", tensor.strides(), " is not contiguous; call .contiguous() first");
  auto ticket = std::make_shared<Ticket>();
  ticket->finish_ = std::make_shared<Ticket::Finish>();
  ticket->record_.collective = collective;
  ticket->record_.label = label;
  ticket->record_.bytes = counted.numel() * counted.element_size();
  ticket->tensors_ = std::move(tensors);
  ticket->record_.issued = monotonic_seconds();
  if (size_ == 1 || (counted.numel() == 0 && !splits)) {
    ticket->finish_->at = ticket->record_.issued;
    return ticket;
  }
  if (!counted.is_cpu()) record_event(ticket->at_issue_, counted.device());
  std::unique_lock<std::mutex> lock(issuing_);
  if (state_ != State::running) stop(lock, c10::str(collective, " of ", label));
  this->start(ticket, counted, start, splits);
  lock.unlock();
  if (counted.is_cpu()) {
    try {
      ticket->work_->getFuture()->addCallback(
          [finish = ticket->finish_](c10::ivalue::Future&) { finish->at = monotonic_seconds(); });
    } catch (const c10::Error&) {
      // Work::getFuture is optional in c10d (gloo has none for its reduce-scatter): see
      // TicketRecord::finished.
    }
  }
  return ticket;
}

// Call with issuing_ held.
void OverlapScheduler::start(const std::shared_ptr<Ticket>& ticket, const at::Tensor& counted,
                             const Start& start, const Splits* splits) {
  const TicketRecord& record = ticket->record_;
  ticket->work_ = start();
  TORCH_CHECK(ticket->work_, record.collective, " of ", record.label, ": the backend of group '", name_,
              "' returned no work to wait for");
  ++started_;
  last_.push_back(
      {record.collective, counted.numel(), counted.scalar_type(), counted.device(), {}, {}, foreign()});
  if (splits) {
    last_.back().sent = splits->sent;
    last_.back().received = splits->received;
  }
  if (last_.size() > kRemembered) last_.pop_front();
  // Tickets that an exception left without a wait are released once they have finished.
  while (!in_flight_.empty() && in_flight_.front().use_count() == 1 &&
         in_flight_.front()->work_->isCompleted())
    in_flight_.pop_front();
  in_flight_.push_back(ticket);
}

std::shared_ptr<Ticket> OverlapScheduler::all_reduce(const at::Tensor& tensor, const std::string& label,
                                                     bool largest) {
  return issue(largest ? "all_reduce_max" : "all_reduce", tensor, {tensor}, label, [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    if (largest) options.reduceOp = c10d::ReduceOp::MAX;
    return group()->allreduce(tensors, options);
  });
}

std::shared_ptr<Ticket> OverlapScheduler::all_gather(const at::Tensor& output, const at::Tensor& input,
                                                     const std::string& label) {
  TORCH_CHECK(output.numel() == input.numel() * size_, "all_gather of ", label, ": the output holds ",
              output.numel(), " elements, not group size ", size_, " x input ", input.numel());
  auto ticket = issue("all_gather", output, {output, input}, label, [&] {
    at::Tensor whole = output.view(-1),
               part = input.view(-1);  // gloo requires equal shapes
    return group()->_allgather_base(whole, part);
  });
  if (!ticket->work_ && input.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

std::shared_ptr<Ticket> OverlapScheduler::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                         const std::string& label) {
  TORCH_CHECK(input.numel() == output.numel() * size_, "reduce_scatter of ", label, ": the input holds ",
              input.numel(), " elements, not group size ", size_, " x output ", output.numel());
  auto ticket = issue("reduce_scatter", input, {output, input}, label, [&] {
    at::Tensor part = output.view(-1), whole = input.view(-1);
    return group()->_reduce_scatter_base(part, whole);
  });
  if (!ticket->work_ && output.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

std::shared_ptr<Ticket> OverlapScheduler::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                                     const std::vector<int64_t>& sent,
                                                     const std::vector<int64_t>& received,
                                                     const std::string& label) {
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
      "all_to_all", input, {output, input}, label, [&] { return start_all_to_all(output, input, splits); },
      &splits);
  if (!ticket->work_ && input.numel() > 0) output.view(-1).copy_(input.view(-1));
  return ticket;
}

c10::intrusive_ptr<c10d::Work> OverlapScheduler::start_all_to_all(at::Tensor output, at::Tensor input,
                                                                  Splits numbers) {
  output = output.view(-1), input = input.view(-1);
  return group()->alltoall_base(output, input, numbers.received, numbers.sent);
}

// Waits, and checks once a second whether the group was given up: gloo has no abort that would end the wait.
void OverlapScheduler::wait_on_host(c10d::Work& work) {
  constexpr std::chrono::milliseconds look_up{1000};
  while (true) {
    const double before = monotonic_seconds();
    try {
      work.wait(look_up);
      return;
    } catch (const std::exception&) {
      // Timed out or failed? Not every work can report completion, but waiting again can.
      if (work.isCompleted() || monotonic_seconds() - before < 0.9) throw;
    }
    const std::lock_guard<std::mutex> lock(issuing_);
    TORCH_CHECK(state_ != State::broken, broken_);
  }
}

void OverlapScheduler::wait(const std::shared_ptr<Ticket>& ticket) {
  TicketRecord& record = ticket->record_;
  TORCH_CHECK(!ticket->waited_, record.collective, " of ", record.label,
              " was waited for already; wait once per ticket");
  TORCH_CHECK(!ticket->given_up_, record.collective, " of ", record.label,
              " was given up when a rank failed; call the stack again");
  ticket->waited_ = true;
  record.waited_from = monotonic_seconds();
  const bool on_cpu = ticket->tensors_.front().is_cpu();
  if (ticket->work_) {
    const std::string name = c10::str(record.collective, " of ", record.label.empty() ? "?" : record.label,
                                      " (", record.bytes, " bytes, group '", name_, "' of ", size_, ")");
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_for_ = name;
    }
    const auto device = ticket->tensors_.front().device();
    if (!on_cpu) record_event(ticket->before_wait_, device);
    try {
      if (on_cpu)
        wait_on_host(*ticket->work_);
      else
        ticket->work_->wait();
    } catch (const std::exception& error) {
      std::unique_lock<std::mutex> halting(issuing_);
      if (state_ != State::running) stop(halting, name);
      // waiting_for_ stays set: it is what the run died of.
      TORCH_CHECK_WITH(DistBackendError, false, "rank ", rank_, " waited for ", name,
                       ", which failed: ", error.what());
    }
    if (!on_cpu) record_event(ticket->after_wait_, device);
    std::unique_lock<std::mutex> halting(issuing_);
    if (state_ != State::running) stop(halting, name);  // zeros may have been summed here
    const auto place = std::find(in_flight_.begin(), in_flight_.end(), ticket);
    if (place != in_flight_.end()) in_flight_.erase(place);
  }
  record.blocked_for = monotonic_seconds() - record.waited_from;
  if (ticket->finish_->at == 0.0) ticket->finish_->at = monotonic_seconds();
  ticket->work_.reset();
  ticket->tensors_.clear();
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_for_.clear();
  if (ticket->after_wait_)
    unsettled_.push_back(ticket);
  else
    account(ticket->record());
}

void OverlapScheduler::settle() {
  for (const auto& ticket : unsettled_) {
    ticket->after_wait_->synchronize();
    TicketRecord record = ticket->record();
    record.blocked_for = ticket->before_wait_->elapsedTime(*ticket->after_wait_) / 1e3;
    record.finished = record.issued + ticket->at_issue_->elapsedTime(*ticket->after_wait_) / 1e3;
    account(record);
  }
  unsettled_.clear();
}

void OverlapScheduler::account(const TicketRecord& record) {
  if (!counting_) return;
  auto& totals = totals_[record.label];
  totals.count += 1;
  totals.bytes += record.bytes;
  // Collectives issued back to back share the link: time with two of them in flight counts once.
  totals.link_seconds += std::max(0.0, record.finished - std::max(record.issued, link_free_from_));
  link_free_from_ = std::max(link_free_from_, record.finished);
  totals.blocked_seconds += record.blocked_for;
  if (recording_) records_.push_back(record);
}

void OverlapScheduler::set_counting(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle();  // earlier waits count as set at that time
  counting_ = on;
}

std::vector<TicketRecord> OverlapScheduler::take_records() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle();
  return std::exchange(records_, {});
}

std::map<std::string, LabelTotals> OverlapScheduler::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle();
  return totals_;
}

void OverlapScheduler::reset_totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle();
  totals_.clear();
}

std::string OverlapScheduler::waiting_for() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiting_for_;
}

}  // namespace oases
