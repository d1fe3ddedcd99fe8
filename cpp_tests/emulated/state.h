// What the parts of the emulation share; see machine.h.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "machine.h"

namespace emulated {

constexpr size_t kStack = 256 << 10, kGuard = 1 << 20, kArena = size_t{64} << 30;

// Who came to a cell of memory, and when: counts of the block's and of the warp's barriers so far.
struct Access {
  uint32_t launch = 0, block = 0, of_block = 0, of_warp = 0;
  uint16_t warp = 0;
  uint8_t lane = 0;  // kSeveral: more than one
  bool atomic = false;
};
constexpr uint8_t kSeveral = 255;

struct Cell {
  Access write, reads[2];  // two reads of different warps: a write that neither forbids, no other does
  bool written = false;
};

struct Region {
  unsigned char* begin;
  size_t bytes, grain;
  Kind kind;
  unsigned char* home;  // where an output goes
  std::vector<Cell> cells;
  bool holds(const unsigned char* at, size_t size) const { return at >= begin && at + size <= begin + bytes; }
};

enum class Waits { no, block, warp, ended };

struct Fiber {
  std::unique_ptr<unsigned char[]> stack;
  ucontext_t first;
  jmp_buf at;
  bool begun = false;
  Waits waits = Waits::ended;
  uint32_t until = 0;  // the count of barriers that it waits to pass
  int line = 0;
  dim3 thread;
};

struct Warp {
  uint32_t passed = 0, arrived = 0;
  int line = 0;
  unsigned char values[2][32][16];
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Region> regions;
  Region shared{nullptr, 0, 1, Kind::output, nullptr, {}};
  size_t dynamic_bytes = 0;
  unsigned char* arena = nullptr;
  size_t used = 0;
  unsigned threads = 0, arrived = 0, alive = 0;
  uint32_t launch = 0, block = 0, passed = 0;
  int line = 0;
  bool running = false, checks = true;
  std::string error;
  const void* faulty = nullptr;
  const std::function<void()>* kernel = nullptr;
  jmp_buf scheduler;
  ucontext_t unused;
  unsigned char* host_stack = nullptr;
};
extern Machine m;

inline Fiber& self() { return m.fibers[here.index]; }
// Notes where the segment of shared memory lies on this thread.
void find_shared_memory();

}  // namespace emulated
