#include "shared_ranks.h"

#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "device_area.h"

namespace oases {
namespace {

using std::chrono::milliseconds;

// How often a wait looks whether its peers are alive.
constexpr milliseconds kLook{100};

// Bytes of the slots of a group at most, and of a rank's slot at least and at most.
constexpr int64_t kSlots = 40 << 20, kLeastSlot = 64 << 10, kMostSlot = 1 << 20;
constexpr int kMostRanks = 256;

static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "words of shared memory are used by several processes");

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

long futex(const std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<uint8_t> bytes_of_text(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void Bell::wake() {
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&word_, FUTEX_WAKE, INT32_MAX, nullptr);
}

void Bell::set(uint32_t value) {
  word_.store(value, std::memory_order_seq_cst);
  wake();
}

void Bell::ring() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  wake();
}

void Bell::wait(uint32_t seen, std::chrono::nanoseconds limit, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value() != seen) return;
    pause_briefly();
  }
  // Counted before the kernel looks at the word: whoever changes it later sees a sleeper.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const timespec relative{limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
  if (word_.load(std::memory_order_seq_cst) == seen) futex(&word_, FUTEX_WAIT, seen, &relative);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

struct SharedRanks::Control {
  Bell attached, ready;
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) Bell steps;  // ended by all ranks
  alignas(64) std::atomic<uint32_t> broken;
  char reason[500];
};

struct SharedRanks::Board {
  alignas(64) std::atomic<uint32_t> arrived_at, left;
  alignas(64) Bell mail;
};

namespace {
enum Broken : uint32_t { kWhole, kWriting, kBroken };

// Waiting actively is worth while only where another processor brings what is waited for. An idle rank waits so for
// some 0.1 ms: ranks that sleep by turns are never runnable at once, so the kernel leaves them on one processor.
constexpr int kSpins = 300, kIdleSpins = 4000;
bool has_processor_for_each(int ranks) { return sysconf(_SC_NPROCESSORS_ONLN) >= ranks; }
}  // namespace

SharedRanks::~SharedRanks() {
  if (!memory_ || getpid() != processes_[rank_].id) return;  // a forked child has no such memory
  board(rank_).left.store(1, std::memory_order_seq_cst);
  control().steps.wake();
  for (int other = 0; other < size_; ++other) board(other).mail.ring();
}

void SharedRanks::lay_out() {
  TORCH_CHECK_VALUE(size_ <= kMostRanks, "staged joins at most ", kMostRanks, " ranks, got ", size_,
                    "; use gloo");
  slot_bytes_ = std::clamp(kSlots / (2 * size_ + 2) & ~int64_t{65535}, kLeastSlot, kMostSlot);
  int64_t at = round_up(sizeof(Control), 64);
  boards_at_ = at, at += size_ * static_cast<int64_t>(sizeof(Board));
  description_stride_ = round_up(static_cast<int64_t>(sizeof(Description)) + 16 * size_, 64);
  descriptions_at_ = at, at += 2 * size_ * description_stride_;
  channels_at_ = at = round_up(at, 4096), at += size_ * size_ * static_cast<int64_t>(sizeof(Channel));
  slots_at_ = at = round_up(at, 4096), at += 2 * (size_ + 1) * slot_bytes_;
  device_area_at_ = at = round_up(at, 4096), at += DeviceArea::bytes_for(size_, DeviceArea::kAllSlots);
  message_area_bytes_ = round_up(DeviceArea::bytes_for(2, DeviceArea::message_slots(size_)), 4096);
  message_areas_at_ = at = round_up(at, 4096), at += int64_t{size_} * size_ * message_area_bytes_;
  bytes_ = at;
}

// Ranks that come together through the store. A rank that gives up says so there.
struct SharedRanks::Join {
  Join(SharedRanks& ranks, const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout)
      : ranks(ranks), store(store), patience("init_process_group", timeout) {
    ranks.processes_.resize(ranks.size_);
  }
  static std::string key_of(int rank) { return c10::str("staged/", rank); }
  std::string missing() const {
    std::string found;
    for (int rank = 0; rank < ranks.size_; ++rank)
      if (!known(rank)) found += c10::str(found.empty() ? "rank " : ", ", ranks.name(rank));
    return found;
  }
  bool known(int rank) const { return ranks.processes_[rank].id != 0; }

  // Raises DistBackendError where a rank has ended or given up.
  void look() {
    if (store->check({kGivenUp})) fail(text_of(kGivenUp));
    for (int rank = 0; rank < ranks.size_; ++rank)
      if (known(rank) && !ranks.processes_[rank].alive())
        give_up(c10::str("rank ", ranks.name(rank), " (process ", ranks.processes_[rank].id, ") has ended"));
  }

  // Waits for the keys of all ranks.
  void find_all(const std::string& own_machine) {
    for (milliseconds pause{1};; pause = std::min(2 * pause, kLook)) {
      for (int rank = 0; rank < ranks.size_; ++rank)
        if (!known(rank) && store->check({key_of(rank)})) take(rank, own_machine);
      look();
      if (missing().empty()) return;
      if (patience.over())
        give_up(c10::str("timed out after ", patience.timeout.count(), " ms waiting for ", missing(),
                         " to join"));
      std::this_thread::sleep_for(pause);
    }
  }

  [[noreturn]] void give_up(const std::string& why) {
    tell(why);
    fail("staged: " + why);
  }

  // Unless a rank has told before.
  void tell(const std::string& why) {
    if (!store->check({kGivenUp})) store->set(kGivenUp, bytes_of_text("staged: " + why));
  }

  static constexpr const char* kGivenUp = "staged/given up";
  SharedRanks& ranks;
  c10::intrusive_ptr<c10d::Store> store;
  Patience patience;
  int file_number = -1;
  uint64_t file_inode = 0;

 private:
  [[noreturn]] static void fail(const std::string& why) {
    TORCH_CHECK_WITH(DistBackendError, false, why);
    std::abort();  // not reached
  }
  std::string text_of(const std::string& key) const {
    const auto bytes = store->get(key);
    return {bytes.begin(), bytes.end()};
  }
  void take(int rank, const std::string& own_machine) {
    std::istringstream fields(text_of(key_of(rank)));
    std::string on;
    Process process;
    int number = -1;
    uint64_t inode = 0;
    fields >> on >> process.id >> process.started >> number >> inode;
    TORCH_CHECK_VALUE(on == own_machine, "staged joins ranks of one machine, but rank ", ranks.name(rank),
                      " is on another one than rank ", ranks.name(ranks.rank_),
                      ", or in another container; use gloo between machines");
    if (rank == 0) file_number = number, file_inode = inode;
    ranks.processes_[rank] = process;
  }
};

SharedRanks::SharedRanks(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         milliseconds timeout, std::vector<int64_t> names)
    : rank_(rank),
      size_(size),
      names_(std::move(names)),
      spins_(has_processor_for_each(size) ? kSpins : 0),
      idle_spins_(spins_ > 0 ? kIdleSpins : 0) {
  lay_out();
  Join join(*this, store, timeout);
  try {
    open(join);
  } catch (const c10::ValueError&) {
    throw;  // of all: each finds a rank that is on another machine than its own
  } catch (const std::exception& error) {
    try {
      join.tell(c10::str("rank ", name(rank_), " failed to join: ", reason_of(error)));
    } catch (
        const std::exception&) {  // the store is gone, and with it whom to tell; the first error says more
    }
    throw;
  }
}

void SharedRanks::open(Join& join) {
  const auto& store = join.store;
  SharedFile file;
  if (rank_ == 0) file = SharedFile::create(bytes_);
  const std::string own_machine = machine();
  const Process own = Process::own();
  store->set(Join::key_of(rank_), bytes_of_text(c10::str(own_machine, " ", own.id, " ", own.started, " ",
                                                         file.number(), " ", file.inode())));
  join.find_all(own_machine);
  if (rank_ != 0) file = SharedFile::open(processes_[0], join.file_number, join.file_inode);
  memory_ = file.map(bytes_);
  if (rank_ != 0) file.close();
  control().attached.ring();
  Bell& awaited = rank_ == 0 ? control().attached : control().ready;
  const uint32_t until = rank_ == 0 ? size_ : 1;
  for (uint32_t seen; (seen = awaited.value()) != until;) {
    awaited.wait(seen, kLook, 0);
    if (awaited.value() == until) break;
    join.look();
    if (join.patience.over())
      join.give_up(
          c10::str("timed out after ", join.patience.timeout.count(), " ms waiting for all ranks to join"));
  }
  if (rank_ == 0) {
    for (int rank = 0; rank < size_; ++rank)
      store->deleteKey(Join::key_of(rank));  // a group of the same name may follow
    control().ready.set(1);
  }
}

SharedRanks::Control& SharedRanks::control() const { return *reinterpret_cast<Control*>(memory_.get()); }

SharedRanks::Board& SharedRanks::board(int rank) const {
  return reinterpret_cast<Board*>(memory_.get() + boards_at_)[rank];
}

std::byte* SharedRanks::slot(int rank, uint32_t step) const {
  return memory_.get() + slots_at_ + ((step % 2) * (size_ + 1) + rank) * slot_bytes_;
}

std::byte* SharedRanks::result(uint32_t step) const { return slot(size_, step); }

Description* SharedRanks::description(int rank, uint32_t turn) const {
  return reinterpret_cast<Description*>(memory_.get() + descriptions_at_ +
                                        ((turn % 2) * size_ + rank) * description_stride_);
}

int64_t* SharedRanks::counts(int rank, uint32_t turn) const {
  return reinterpret_cast<int64_t*>(description(rank, turn) + 1);
}

std::byte* SharedRanks::channel(int from, int to) const {
  return memory_.get() + channels_at_ + (from * size_ + to) * static_cast<int64_t>(sizeof(Channel));
}

Bell& SharedRanks::mail_bell(int rank) const { return board(rank).mail; }

void SharedRanks::meet(const Patience& patience) {
  Control& shared = control();
  const uint32_t next = step_ + 1;
  board(rank_).arrived_at.store(next, std::memory_order_release);
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    shared.arrived.store(0, std::memory_order_relaxed);  // ordered by the step's end
    shared.steps.set(next);
  } else {
    while (shared.steps.value() != next) {
      shared.steps.wait(step_, kLook, patience.idle ? idle_spins_ : spins_);
      if (shared.steps.value() == next) break;
      check_whole();
      const std::string lost = look_for_lost();
      if (!lost.empty() && shared.steps.value() != next) give_up(patience.operation + ": " + lost);
      if (patience.over() && shared.steps.value() != next)
        give_up(c10::str(patience.operation, ": rank ", name(rank_), " timed out after ",
                         patience.timeout.count(), " ms waiting for ", missing()));
    }
  }
  step_ = next;
}

std::string SharedRanks::gone(int rank) const {
  if (board(rank).left.load(std::memory_order_seq_cst))
    return c10::str("rank ", name(rank), " has left the group");
  const Process& process = processes_[rank];
  if (process.alive()) return "";
  return c10::str("rank ", name(rank), " (process ", process.id, ") has ended");
}

// A rank that arrived may leave; that only matters when it was the last, and ended before it could say so.
std::string SharedRanks::look_for_lost() const {
  std::string lost;
  bool all_arrived = true;
  for (int rank = 0; rank < size_; ++rank) {
    const std::string why = gone(rank);
    const bool arrived = board(rank).arrived_at.load(std::memory_order_acquire) == step_ + 1;
    all_arrived &= arrived;
    if (!why.empty() && (!arrived || lost.empty())) lost = why;
    if (!why.empty() && !arrived) return why;
  }
  return all_arrived ? lost : "";
}

std::string SharedRanks::missing() const {
  std::string ranks;
  for (int rank = 0; rank < size_; ++rank)
    if (board(rank).arrived_at.load(std::memory_order_acquire) != step_ + 1)
      ranks += c10::str(ranks.empty() ? "rank " : ", ", name(rank));
  return ranks;
}

std::string SharedRanks::broken() const {
  return control().broken.load(std::memory_order_acquire) == kBroken ? control().reason : "";
}

void SharedRanks::check_whole() const {
  const std::string why = broken();
  TORCH_CHECK_WITH(DistBackendError, why.empty(), why);
}

void SharedRanks::break_group(const std::string& reason) {
  Control& shared = control();
  uint32_t whole = kWhole;
  if (shared.broken.compare_exchange_strong(whole, kWriting)) {
    std::snprintf(shared.reason, sizeof shared.reason, "%s", reason.c_str());
    shared.broken.store(kBroken, std::memory_order_release);
  }
  shared.attached.wake(), shared.ready.wake(), shared.steps.wake();
  for (int rank = 0; rank < size_; ++rank) board(rank).mail.ring();
}

void SharedRanks::give_up(const std::string& reason) {
  break_group(reason);
  check_whole();  // the first reason
  TORCH_CHECK_WITH(DistBackendError, false, reason);
}

}  // namespace oases
