#include "local_work.h"
#include "quantized_backend.h"
#include "scheduler.h"

// The records of tickets and their sums.
namespace oases {

// One accelerator's tickets on its clock: the host issues a step's collectives long before they run. Times count
// from event to event, which elapsedTime gives in a float of milliseconds.
void OverlapScheduler::settle_first() {
  const auto ticket = std::move(unsettled_.front());
  unsettled_.pop_front();
  if (last_issue_) device_seconds_ += last_issue_->elapsedTime(*ticket->at_issue_) / 1e3;
  const double link_seconds = ticket->at_issue_->elapsedTime(*ticket->end_) / 1e3;
  TicketRecord record = ticket->record();
  record.blocked_for = ticket->before_wait_->elapsedTime(*ticket->after_wait_) / 1e3;
  record.finished = record.issued + link_seconds;
  account(record, device_seconds_, device_seconds_ + link_seconds, device_link_free_from_);
  last_issue_ = std::move(ticket->at_issue_);
}

// Without the mutex while the device works: it may wait for a rank that is late, and others ask for what meanwhile.
void OverlapScheduler::settle(std::unique_lock<std::mutex>& lock) {
  const auto waiting = unsettled_;
  lock.unlock();
  for (const auto& ticket : waiting) {
    ticket->after_wait_->synchronize();
    ticket->end_->synchronize();
  }
  lock.lock();
  // Some may have been settled by others since; they leave in their order.
  for (const auto& ticket : waiting)
    if (!unsettled_.empty() && unsettled_.front() == ticket) settle_first();
}

void OverlapScheduler::account(const TicketRecord& record, double issued, double finished,
                               double& link_free_from) {
  if (!counting_) return;
  auto& totals = totals_[record.label];
  totals.collective = record.collective;
  totals.count += 1;
  totals.bytes += record.bytes;
  totals.saved_bytes += record.saved_bytes;
  // Collectives issued back to back share the link: time with two of them in flight counts once.
  totals.link_seconds += std::max(0.0, finished - std::max(issued, link_free_from));
  link_free_from = std::max(link_free_from, finished);
  totals.blocked_seconds += record.blocked_for;
  if (recording_) records_.push_back(record);
}

void OverlapScheduler::set_counting(bool on) {
  std::unique_lock<std::mutex> lock(mutex_);
  settle(lock);  // earlier waits count as set at that time
  counting_ = on;
}

std::vector<TicketRecord> OverlapScheduler::take_records() {
  std::unique_lock<std::mutex> lock(mutex_);
  settle(lock);
  return std::exchange(records_, {});
}

std::map<std::string, LabelTotals> OverlapScheduler::totals() {
  std::unique_lock<std::mutex> lock(mutex_);
  settle(lock);
  return totals_;
}

void OverlapScheduler::reset_totals() {
  std::unique_lock<std::mutex> lock(mutex_);
  settle(lock);
  totals_.clear();
}

std::map<std::string, SumErrors> OverlapScheduler::errors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return errors_;
}

void OverlapScheduler::note_error(const Judgement& work, const std::string& label) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (work.relative_error) {
    SumErrors& errors = errors_[label];
    errors.samples += 1;
    errors.sum += *work.relative_error;
  }
  if (work.layer.empty()) return;
  const double error = work.relative_error.value_or(std::numeric_limits<double>::infinity());
  exempted_[work.layer] = error;
  if (rank_ == 0)
    TORCH_WARN("the relative error of ", work.layer, " stayed above ", LayerErrors::kLargest, ": ", error,
               "; it is sent in bfloat16 from now on");
}

std::map<std::string, double> OverlapScheduler::exempted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exempted_;
}

}  // namespace oases
