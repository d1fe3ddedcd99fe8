#include "stream_watch.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "join_thread.h"
#include "stream_words.h"

namespace oases {
namespace {
constexpr std::chrono::milliseconds kGlance{20};
}  // namespace

bool Watched::ended() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool ended = true;
  try {
    ended = done->query();
    // After that: who lets the waits of a group end has given it up before.
    const std::string why = seen_ ? "" : ranks_->broken();
    seen_ |= ended;
    TORCH_CHECK_WITH(DistBackendError, why.empty(), why);
  } catch (...) {  // or an error of the device, which then runs nothing any more
    if (!failure_) failure_ = std::current_exception();
    seen_ = true;
  }
  return ended;
}

std::exception_ptr Watched::failure() const {
  ended();
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

StreamWatch::StreamWatch(std::shared_ptr<SharedRanks> ranks, DeviceArea area, int rank, c10::Device device)
    : ranks_(std::move(ranks)), area_(area), rank_(rank), device_(device) {
  thread_ = std::thread([this] { serve(); });
}

StreamWatch::~StreamWatch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  join_thread(thread_);
}

void StreamWatch::add(std::shared_ptr<Watched> watched) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(watched));
  }
  changed_.notify_all();
}

void StreamWatch::serve() {
  try {
    // A new thread is on device 0, where it would take memory.
    c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  } catch (const std::exception& error) {
    // It looks on, so that the waits of streams end, and works raise this.
    ranks_->break_group(
        c10::str("staged: rank ", ranks_->rank(), " cannot use ", device_, ": ", reason_of(error)));
  }
  bool poisoned = false;
  std::shared_ptr<Watched> stuck;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !watched_.empty(); });
    while (!watched_.empty() && watched_.front()->ended()) watched_.pop_front();
    if (watched_.empty()) {
      stuck.reset();
      if (closing_) return;
      continue;
    }
    const auto first = watched_.front(), last = watched_.back();
    lock.unlock();
    const std::string why = stuck == first ? why_never(*first) : "";
    stuck = first;
    if (!why.empty()) {
      ranks_->break_group(why);
      if (!poisoned) area_.poison();
      poisoned = true;
      area_.end_waits(last->last_piece, rank_, last->pairs);
    }
    std::this_thread::sleep_for(kGlance);
    lock.lock();
  }
}

// How many pieces a rank is behind what a collective waits for, in each of its steps; none are negative.
StreamWatch::Behind StreamWatch::behind(int rank, const Watched& watched) const {
  DeviceArea::Words& words = area_.words(rank);
  const auto pieces = [](uint32_t until, uint32_t& word) {
    return std::max(0, static_cast<int32_t>(until - DeviceArea::value(word)));
  };
  const uint32_t last = watched.last_piece;
  return {pieces(last, words.put), watched.sums ? pieces(last, words.summed) : 0,
          pieces(last - DeviceArea::kSlots, words.done)};
}

// Of a rank that will never do what a collective waits for, or "".
std::string StreamWatch::lost(const Watched& watched) const {
  for (int rank = 0; rank < area_.size(); ++rank) {
    const int name = area_.ranks()[rank];
    const std::string gone = name == ranks_->rank() ? "" : ranks_->gone(name);
    // After that: a rank that has gone writes no more.
    if (!gone.empty() && behind(rank, watched) != Behind{}) return gone;
  }
  return "";
}

// The ranks that are the most behind: others may wait for them.
std::string StreamWatch::latest(const Watched& watched) const {
  Behind most{};
  std::string ranks;
  for (int rank = 0; rank < area_.size(); ++rank) {
    const Behind found = behind(rank, watched);
    if (found > most) most = found, ranks.clear();
    if (found == most) ranks += c10::str(ranks.empty() ? "rank " : ", ", area_.ranks()[rank]);
  }
  return ranks;
}

// Why a collective will never be done, or "".
std::string StreamWatch::why_never(const Watched& watched) const {
  const std::string broken = ranks_->broken();
  if (!broken.empty()) return broken;
  const Patience& patience = watched.patience;
  const std::string gone = lost(watched);
  if (!gone.empty()) return c10::str(patience.operation, ": ", gone);
  if (!patience.over()) return "";
  return c10::str(patience.operation, ": rank ", ranks_->rank(), " timed out after ",
                  patience.timeout.count(), " ms waiting for ", latest(watched));
}

}  // namespace oases
