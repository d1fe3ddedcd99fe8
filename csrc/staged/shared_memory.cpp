#include "shared_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
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
#include <vector>

namespace oases {
namespace {

// 0 for a process of which only the exit code is left, too.
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

// What a forked child must not have. Its mutex is held over a fork, so no file or mapping is half noted.
struct Held {
  static Held& all() {
    static Held* const held = new Held;  // never destroyed: threads may fork at exit
    return *held;
  }
  Held() {
    pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                   [] {
                     for (const int number : all().files) close(number);
                     all().files.clear();
                     all().mapped.clear();
                     all().mutex.unlock();
                   });
  }
  std::mutex mutex;
  std::vector<int> files;
  std::map<uint64_t, std::weak_ptr<std::byte>> mapped;  // by inode
};

template <typename Open>
int opened(const Open& open) {
  Held& held = Held::all();
  const std::lock_guard<std::mutex> lock(held.mutex);
  const int number = open();
  if (number >= 0) held.files.push_back(number);
  return number;
}

}  // namespace

Process Process::own() { return {getpid(), start_of(getpid())}; }

bool Process::alive() const { return start_of(id) == started; }

std::string machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ids{};
  TORCH_CHECK(!boot.empty() && ::stat("/proc/self/ns/pid", &ids) == 0,
              "staged: /proc is not mounted here, by which ranks find one another; mount it, or use gloo");
  return c10::str(boot, "-", ids.st_ino);
}

SharedFile SharedFile::create(int64_t bytes) {
  constexpr unsigned kCloseOnExec = 1, kSealable = 2, kNeverRun = 8;  // the last from Linux 6.3 on
  const auto create = [](unsigned flags) {
    return opened([flags] {
      return static_cast<int>(syscall(SYS_memfd_create, "oases-staged", kCloseOnExec | kSealable | flags));
    });
  };
  SharedFile file(create(kNeverRun));
  if (file.number_ < 0 && errno == EINVAL) file = SharedFile(create(0));
  TORCH_CHECK(file.number_ >= 0, "staged: memfd_create failed: ", std::strerror(errno));
  // Sealed: memory that shrinks under its readers would kill them.
  TORCH_CHECK(fchmod(file.number_, 0600) == 0 && ftruncate(file.number_, bytes) == 0 &&
                  fcntl(file.number_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
              "staged: ", bytes, " bytes of shared memory are not available: ", std::strerror(errno));
  return file;
}

SharedFile SharedFile::open(const Process& owner, int number, uint64_t inode) {
  const std::string path = c10::str("/proc/", owner.id, "/fd/", number);
  SharedFile file(opened([&path] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); }));
  TORCH_CHECK_WITH(DistBackendError, file.number_ >= 0 && file.inode() == inode,
                   "staged: cannot open the memory of rank 0, ", path, ": ",
                   file.number_ < 0 ? std::strerror(errno) : "it is another file",
                   "; rank 0 has ended, or belongs to another user");
  return file;
}

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

void SharedFile::close() {
  if (number_ < 0) return;
  Held& held = Held::all();
  const std::lock_guard<std::mutex> lock(held.mutex);
  const auto noted = std::find(held.files.begin(), held.files.end(), number_);
  if (noted != held.files.end()) {  // not in a child, where it was closed
    held.files.erase(noted);
    ::close(number_);
  }
  number_ = -1;
}

uint64_t SharedFile::inode() const {
  struct stat about{};
  return fstat(number_, &about) == 0 ? about.st_ino : 0;
}

std::shared_ptr<std::byte> SharedFile::map(int64_t bytes) const {
  Held& held = Held::all();
  const std::lock_guard<std::mutex> lock(held.mutex);
  auto& known = held.mapped;
  for (auto it = known.begin(); it != known.end();)
    it = it->second.expired() ? known.erase(it) : std::next(it);
  if (auto found = known[inode()].lock()) return found;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, number_, 0);
  TORCH_CHECK(memory != MAP_FAILED, "staged: mapping ", bytes,
              " bytes of shared memory failed: ", std::strerror(errno));
  madvise(memory, bytes, MADV_DONTFORK);
  std::shared_ptr<std::byte> mapped(static_cast<std::byte*>(memory),
                                    [bytes, process = getpid()](std::byte* start) {
                                      // A fork may have something else there.
                                      if (getpid() == process) munmap(start, bytes);
                                    });
  known[inode()] = mapped;
  return mapped;
}

}  // namespace oases
