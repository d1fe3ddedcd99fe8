#include "shared_ranks.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

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

// When a process started, in clock ticks since boot; 0 if there is none, or only its exit code. Together with the id
// it names a process for good.
uint64_t start_of(int64_t process) {
  std::ifstream file(c10::str("/proc/", process, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X" || field == "x") return 0;
  for (int i = 4; i < 22; ++i) fields >> field;
  uint64_t started = 0;
  fields >> started;
  return started;
}

// Name of what can share memory: a boot of a kernel, and the process ids seen there.
std::string machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ids{};
  TORCH_CHECK(!boot.empty() && ::stat("/proc/self/ns/pid", &ids) == 0,
              "staged: /proc is not mounted here, by which ranks find one another; mount it, or use gloo");
  return c10::str(boot, "-", ids.st_ino);
}

// Memory opened by this process. Ranks that are threads of one process use the same addresses, so that a race between
// them is seen by ThreadSanitizer.
std::shared_ptr<std::byte> map(int file, int64_t bytes, uint64_t inode) {
  static std::mutex mutex;
  static std::map<uint64_t, std::weak_ptr<std::byte>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = known.begin(); it != known.end();)
    it = it->second.expired() ? known.erase(it) : std::next(it);
  if (auto found = known[inode].lock()) return found;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(memory != MAP_FAILED, "staged: mapping ", bytes,
              " bytes of shared memory failed: ", std::strerror(errno));
  madvise(memory, bytes, MADV_DONTFORK);  // a child that was forked must not keep it
  std::shared_ptr<std::byte> held(static_cast<std::byte*>(memory),
                                  [bytes](std::byte* start) { munmap(start, bytes); });
  known[inode] = held;
  return held;
}

struct File {
  ~File() {
    if (number >= 0) close(number);
  }
  uint64_t inode() const {
    struct stat about{};
    return fstat(number, &about) == 0 ? about.st_ino : 0;
  }
  int number = -1;
};

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

// Waiting actively is worth while only where another processor brings what is waited for.
int spins_for(int ranks) {
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return processors >= ranks ? 300 : 0;
}
}  // namespace

SharedRanks::SharedRanks(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         milliseconds timeout)
    : rank_(rank), size_(size), spins_(spins_for(size)) {
  lay_out();
  open(store, timeout);
}

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
  bytes_ = at;
}

void SharedRanks::open(const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  File file;
  const auto key_of = [](int rank) { return c10::str("staged/", rank); };
  if (rank_ == 0) {
    constexpr unsigned kCloseOnExec = 1, kSealable = 2, kNeverRun = 8;  // the last from Linux 6.3 on
    const auto create = [](unsigned flags) {
      return static_cast<int>(syscall(SYS_memfd_create, "oases-staged", kCloseOnExec | kSealable | flags));
    };
    file.number = create(kNeverRun);
    if (file.number < 0 && errno == EINVAL) file.number = create(0);
    TORCH_CHECK(file.number >= 0, "staged: memfd_create failed: ", std::strerror(errno));
    // Sealed: memory that shrinks under its readers would kill them.
    TORCH_CHECK(fchmod(file.number, 0600) == 0 && ftruncate(file.number, bytes_) == 0 &&
                    fcntl(file.number, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
                "staged: ", bytes_, " bytes of shared memory are not available: ", std::strerror(errno));
  }
  const std::string own_machine = machine();
  store->set(key_of(rank_), bytes_of_text(c10::str(own_machine, " ", getpid(), " ", start_of(getpid()), " ",
                                                   file.number, " ", file.inode())));
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key_of(rank));
  store->wait(keys, timeout);
  int number = -1;
  uint64_t inode = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const auto text = store->get(key_of(rank));
    std::istringstream fields(std::string(text.begin(), text.end()));
    std::string on;
    Process process{};
    int file_number = -1;
    uint64_t file_inode = 0;
    fields >> on >> process.id >> process.started >> file_number >> file_inode;
    if (rank == 0) number = file_number, inode = file_inode;
    processes_.push_back(process);
    TORCH_CHECK_VALUE(on == own_machine, "staged joins ranks of one machine, but rank ", rank,
                      " is on another one than rank ", rank_,
                      ", or in another container; use gloo between machines");
  }
  if (rank_ != 0) {
    const std::string path = c10::str("/proc/", processes_[0].id, "/fd/", number);
    file.number = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK_WITH(DistBackendError, file.number >= 0 && file.inode() == inode, "staged: rank ", rank_,
                     " cannot open the memory of rank 0, ", path, ": ",
                     file.number < 0 ? std::strerror(errno) : "it is another file",
                     "; rank 0 has ended, or belongs to another user");
  }
  memory_ = map(file.number, bytes_, inode);
  // Then nobody needs the file any more.
  const Patience patience("init_process_group", timeout);
  control().attached.ring();
  Bell& awaited = rank_ == 0 ? control().attached : control().ready;
  const uint32_t until = rank_ == 0 ? size_ : 1;
  for (uint32_t seen; (seen = awaited.value()) != until;) {
    awaited.wait(seen, kLook, 0);
    check_whole();
    for (int rank = 0; rank < size_; ++rank)
      if (const auto why = gone(rank); !why.empty() && awaited.value() != until) give_up("staged: " + why);
    if (patience.over() && awaited.value() != until)
      give_up(c10::str("staged: timed out after ", timeout.count(), " ms waiting for all ranks to join"));
  }
  if (rank_ == 0) {
    for (const auto& key : keys) store->deleteKey(key);  // a group of the same name may follow
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
      shared.steps.wait(step_, kLook, spins_);
      if (shared.steps.value() == next) break;
      check_whole();
      const std::string lost = look_for_lost();
      if (!lost.empty() && shared.steps.value() != next) give_up(patience.operation + ": " + lost);
      if (patience.over() && shared.steps.value() != next)
        give_up(c10::str(patience.operation, ": rank ", rank_, " timed out after ", patience.timeout.count(),
                         " ms waiting for ", missing()));
    }
  }
  step_ = next;
}

std::string SharedRanks::gone(int rank) const {
  if (board(rank).left.load(std::memory_order_seq_cst)) return c10::str("rank ", rank, " has left the group");
  const Process& process = processes_[rank];
  if (start_of(process.id) == process.started) return "";
  return c10::str("rank ", rank, " (process ", process.id, ") has ended");
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
      ranks += c10::str(ranks.empty() ? "rank " : ", ", rank);
  return ranks;
}

void SharedRanks::check_whole() const {
  if (control().broken.load(std::memory_order_acquire) == kBroken)
    TORCH_CHECK_WITH(DistBackendError, false, control().reason);
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
