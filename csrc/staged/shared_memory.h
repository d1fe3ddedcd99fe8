// Memory without a name that processes of one machine share, and the names by which they find one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace oases {

// A process for good: its id may be given to another one later, which starts at another time.
struct Process {
  static Process own();
  bool alive() const;

  int64_t id = 0;
  uint64_t started = 0;  // clock ticks since boot; 0: there is none
};

// Name of what can share memory: a boot of a kernel, and the process ids seen there.
std::string machine();

// An anonymous file (memfd) while its memory is being mapped. Neither programs that are started nor children that are
// forked meanwhile keep it.
class SharedFile {
 public:
  // Of zeros, open to this user alone, of a size that is fixed.
  static SharedFile create(int64_t bytes);
  // The file that another process has under this number. Raises DistBackendError where it cannot be opened.
  static SharedFile open(const Process& owner, int number, uint64_t inode);
  SharedFile() = default;
  SharedFile(SharedFile&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  SharedFile& operator=(SharedFile&& other) noexcept;
  ~SharedFile() { close(); }

  int number() const { return number_; }
  uint64_t inode() const;
  // Memory of the file, which needs it no longer. Ranks that are threads of one process get the same addresses, so that a
  // race between them is seen by ThreadSanitizer.
  std::shared_ptr<std::byte> map(int64_t bytes) const;
  void close();

 private:
  explicit SharedFile(int number) : number_(number) {}
  int number_ = -1;
};

}  // namespace oases
