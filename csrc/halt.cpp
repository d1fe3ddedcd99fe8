// Failure protocol of OverlapScheduler, on a thread of its own, and what a rank that hangs waits for; see the header.
#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include "scheduler.h"

// As in scheduler.cpp.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace oases {

HaltState OverlapScheduler::halt(const std::string& failure, bool out_of_memory) {
  const std::lock_guard<std::mutex> lock(issuing_);
  HaltState state;
  state.newly = state_ == State::running;
  if (state.newly) {
    state_ = State::halted;
    failure_ = failure;
    out_of_memory_ = out_of_memory;
  }
  state.started = started_;
  state.last.assign(last_.begin(), last_.end());
  state.foreign = foreign();
  state.foreign_at_first = foreign_at_first_;
  return state;
}

// Call with issuing_ held.
int64_t OverlapScheduler::foreign() {
  // A wire's collectives are counted by the scheduler of the group that it is of.
  if (!countable_ || !code_.empty()) return 0;
  try {
    return static_cast<int64_t>(group()->getSequenceNumberForGroup()) - (started_ - on_wires_);
  } catch (const c10::Error&) {
    // Counting is optional in c10d; without it a foreign collective in flight shows as a
    // drain that does not end.
    countable_ = false;
    return 0;
  }
}

void OverlapScheduler::fill(const std::string& named, const at::Tensor& whole,
                            const std::vector<int64_t>& sent, const std::vector<int64_t>& received) {
  const size_t colon = named.find(':'), bar = named.find('|');
  const bool on_wire = colon != std::string::npos;
  const std::string collective = named.substr(0, colon),
                    wire = on_wire ? named.substr(colon + 1, bar - colon - 1) : "",
                    label = on_wire ? named.substr(bar + 1) : "nothing, for a rank that failed";
  auto ticket = std::make_shared<Ticket>();
  ticket->record_.collective = named.substr(0, bar);
  ticket->record_.label = label;
  at::Tensor flat = whole.view(-1);
  at::Tensor part = collective.rfind("all_reduce", 0) == 0 ? flat : flat.new_zeros({flat.numel() / size_});
  const bool splits = collective == "all_to_all";
  if (splits) {
    flat = whole.new_zeros({std::accumulate(sent.begin(), sent.end(), int64_t{0})});
    part = whole.new_empty({std::accumulate(received.begin(), received.end(), int64_t{0})});
  }
  // Zeros are never used on the CPU, where a wait looks whether the rank was halted. An accelerator's host may have
  // passed its waits, and its optimizer be queued: no sum may be silently wrong.
  if (!whole.is_cpu() && at::isFloatingType(whole.scalar_type())) {
    flat.fill_(std::numeric_limits<double>::quiet_NaN());
    part.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  ticket->tensors_ = {flat, part};
  Tickets ended;  // freed without the lock
  const std::lock_guard<std::mutex> lock(issuing_);
  const Splits numbers{sent, received};
  const auto by = [&] { return group(wire, label, whole.device().type()); };
  const auto begin = [&](Ticket& ticket) -> c10::intrusive_ptr<c10d::Work> {
    if (splits) return start_all_to_all(part, flat, numbers, wire, label);
    if (collective == "all_gather") return by()->_allgather_base(flat, part);
    if (collective == "reduce_scatter") return start_reduce_scatter(ticket, part, flat, wire, label);
    c10d::AllreduceOptions options;
    if (collective == "all_reduce_max")
      options.reduceOp = c10d::ReduceOp::MAX;
    else
      TORCH_CHECK(collective == "all_reduce", "unknown collective '", collective, "'");
    std::vector<at::Tensor> tensors{flat};
    return by()->allreduce(tensors, options);
  };
  ended = start(ticket, flat, begin, splits ? &numbers : nullptr);
}

std::string OverlapScheduler::drain(double patience_seconds) {
  struct UnderWay {
    std::string name;
    c10::intrusive_ptr<c10d::Work> work;
    bool on_cpu;
  };
  std::vector<UnderWay> under_way;
  {
    const std::lock_guard<std::mutex> lock(issuing_);
    for (const auto& ticket : in_flight_)
      under_way.push_back({c10::str(ticket->record_.collective, " of ", ticket->record_.label), ticket->work_,
                           ticket->tensors_.front().is_cpu()});
  }
  const double end = monotonic_seconds() + patience_seconds;
  for (const auto& [name, work, on_cpu] : under_way) {
    if (on_cpu) {
      // Not every CPU work can report completion.
      const double left = std::max(0.0, end - monotonic_seconds());
      try {
        work->wait(std::chrono::milliseconds(1 + static_cast<int64_t>(1e3 * left)));
      } catch (const std::exception& error) {
        return c10::str(name, " did not end: ", error.what());
      }
      continue;
    }
    while (!work->isCompleted()) {  // wait() would block a stream, not this thread
      if (monotonic_seconds() > end) return name + " did not end";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (work->exception()) return name + " failed";  // not isSuccess(), which throws for NCCL's works
  }
  decltype(in_flight_) ended;  // freed without the lock
  const std::lock_guard<std::mutex> lock(issuing_);
  for (const auto& ticket : in_flight_) ticket->given_up_ = true;
  ended.swap(in_flight_);
  return "";
}

void OverlapScheduler::resume(const std::string& broken) {
  {
    const std::lock_guard<std::mutex> lock(issuing_);
    broken_ = broken;
    state_ = broken.empty() ? State::settled : State::broken;
  }
  resumed_.notify_all();
}

// The main thread gets the failure. Call with issuing_ held.
void OverlapScheduler::end_halt(std::unique_lock<std::mutex>& lock) {
  resumed_.wait(lock, [this] { return state_ != State::halted; });
  ++failures_;
  if (state_ == State::settled) state_ = State::running;
}

std::string OverlapScheduler::acknowledge() {
  std::unique_lock<std::mutex> lock(issuing_);
  end_halt(lock);
  return broken_;
}

void OverlapScheduler::stop(std::unique_lock<std::mutex>& lock, const std::string& at) {
  end_halt(lock);
  const std::string failure = failure_, broken = broken_;
  const bool out_of_memory = out_of_memory_;
  lock.unlock();
  {
    const std::lock_guard<std::mutex> waiting(mutex_);
    waiting_for_.clear();
  }
  std::string message = c10::str("rank ", rank_, " stopped at ", at, ": ", failure);
  if (!broken.empty()) message += c10::str("; group '", name_, "' was aborted: ", broken);
  TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory, message);
  TORCH_CHECK_WITH(DistBackendError, false, message);
}

void OverlapScheduler::check() {
  std::unique_lock<std::mutex> lock(issuing_);
  if (state_ != State::running) stop(lock, "the start of a call");
}

int64_t OverlapScheduler::failures() const {
  const std::lock_guard<std::mutex> lock(issuing_);
  return failures_;
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
  decltype(in_flight_) ended;  // freed without the lock
  const std::lock_guard<std::mutex> lock(issuing_);
  state_ = State::running;
  failure_.clear();
  broken_.clear();
  failures_ = started_ = on_wires_ = 0;
  foreign_at_first_ = foreign();
  last_.clear();
  ended.swap(in_flight_);
  wires_.clear();
  errors_.clear();
  exempted_.clear();
}

}  // namespace oases
