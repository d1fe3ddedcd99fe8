#include "machine.h"

#include <dlfcn.h>

#include <cstdio>
#include <stdexcept>

#include "state.h"

namespace emulated {

Place here;
Machine m;

namespace {

std::string where(const void* from) {
  Dl_info info;
  if (!from || !dladdr(from, &info)) return "";
  char command[4096], line[1024] = "";
  const auto offset = static_cast<const char*>(from) - static_cast<const char*>(info.dli_fbase) - 1;
  snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname, size_t(offset));
  if (FILE* out = popen(command, "r")) {
    if (!fgets(line, sizeof line, out)) line[0] = 0;
    pclose(out);
  }
  std::string text = line;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.empty() ? "" : " at " + text.substr(text.rfind('/') + 1);
}

[[noreturn]] void leave(Waits waits) {
  self().waits = waits;
  _longjmp(m.scheduler, 1);
}

void pause(Waits waits, uint32_t until) {
  Fiber& fiber = self();
  fiber.waits = waits;
  fiber.until = until;
  if (!_setjmp(fiber.at)) _longjmp(m.scheduler, 1);
}

void run_fiber() {
  for (;;) {
    (*m.kernel)();
    --m.alive;
    pause(Waits::ended, 0);
  }
}

void resume(unsigned index) {
  Fiber& fiber = m.fibers[index];
  here.index = index;
  here.thread = fiber.thread;
  fiber.waits = Waits::no;
  m.running = m.checks = true;
  if (!_setjmp(m.scheduler)) {
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = kStack;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, run_fiber, 0);
    setcontext(&fiber.first);
  }
  m.running = false;
}

bool may_go_on(const Fiber& fiber, unsigned index) {
  switch (fiber.waits) {
    case Waits::no:
      return true;
    case Waits::block:
      return m.passed >= fiber.until;
    case Waits::warp:
      return m.warps[index / 32].passed >= fiber.until;
    case Waits::ended:
      return false;
  }
  return false;
}

std::string stuck() {
  for (unsigned i = 0; i < m.threads; ++i) {
    const Fiber& fiber = m.fibers[i];
    if (fiber.waits != Waits::block && fiber.waits != Waits::warp) continue;
    return "a divergent barrier: thread " + std::to_string(i) + " waits at line " +
           std::to_string(fiber.line) + " for its " + (fiber.waits == Waits::block ? "block" : "warp") +
           ", of which others wait elsewhere or have returned";
  }
  return "no thread can go on";
}

void run_block() {
  m.arrived = m.passed = 0;
  m.alive = m.threads;
  for (Warp& warp : m.warps) warp.passed = warp.arrived = 0;
  m.shared.cells.assign(m.shared.bytes, Cell{});
  std::memset(m.shared.begin, 0xff, m.shared.bytes);
  for (unsigned i = 0; i < m.threads; ++i) m.fibers[i].waits = Waits::no;
  while (m.alive) {
    bool moved = false;
    for (unsigned i = 0; i < m.threads && m.error.empty(); ++i) {
      if (!may_go_on(m.fibers[i], i)) continue;
      moved = true;
      resume(i);
    }
    if (m.error.empty() && !moved) m.error = stuck() + " (block " + std::to_string(m.block) + ")";
    if (!m.error.empty()) return;
  }
}

[[noreturn]] void elsewhere(const char* what, int line, int others) {
  char text[96];
  snprintf(text, sizeof text, "a divergent %s: line %d while others wait at line %d", what, line, others);
  m.checks = false;
  fault(text);
}

}  // namespace

void fault(const std::string& what, const void* from) {
  m.checks = false;
  const auto& [thread, block, block_size, grid_size, index] = here;
  char text[256];
  snprintf(text, sizeof text, " by thread (%u, %u) of block (%u, %u)", thread.x, thread.y, block.x, block.y);
  m.error = what + text;
  m.faulty = from;
  leave(Waits::ended);
}

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  const auto refuse = [](const char* what) { throw std::runtime_error(std::string("emulated: ") + what); };
  m.threads = block.x * block.y * block.z;
  if (grid.x == 0 || grid.x > 2147483647u || grid.y == 0 || grid.y > 65535 || grid.z != 1)
    refuse("a grid that CUDA refuses");
  if (m.threads == 0 || m.threads > 1024 || block.z != 1) refuse("a block that CUDA refuses");
  if (shared_bytes > kSharedBytes) refuse("more dynamic shared memory than a block has");
  if (m.fibers.size() < m.threads) m.fibers.resize(m.threads);
  for (unsigned i = 0; i < m.threads; ++i) {
    Fiber& fiber = m.fibers[i];
    if (!fiber.stack) fiber.stack = std::make_unique<unsigned char[]>(kStack);
    fiber.thread = {i % block.x, i / block.x};
  }
  m.warps.assign((m.threads + 31) / 32, Warp{});
  here.block_size = block;
  here.grid_size = grid;
  m.dynamic_bytes = shared_bytes;
  m.kernel = &kernel;
  m.host_stack = static_cast<unsigned char*>(__builtin_frame_address(0));
  m.error.clear();
  m.faulty = nullptr;
  ++m.launch;
  find_shared_memory();
  for (m.block = 0; m.block < grid.x * grid.y && m.error.empty(); ++m.block) {
    here.block = {m.block % grid.x, m.block / grid.x};
    run_block();
  }
  if (m.error.empty()) return;
  for (Fiber& fiber : m.fibers) fiber.begun = false;  // they are in the middle of a kernel
  throw std::runtime_error("emulated: " + m.error + where(m.faulty));
}

void wait_for_block(int line) {
  if (m.arrived++ == 0)
    m.line = line;
  else if (line != m.line)
    elsewhere("barrier", line, m.line);
  self().line = line;
  if (m.arrived < m.threads) return pause(Waits::block, m.passed + 1);
  m.arrived = 0;
  ++m.passed;
}

Lanes exchange_bytes(unsigned mask, const void* mine, size_t bytes, int line) {
  const unsigned lane = here.index % 32;
  Warp& warp = m.warps[here.index / 32];
  if (mask != ~0u || m.threads % 32) {
    m.checks = false;
    fault("a warp intrinsic without all 32 lanes");
  }
  if (warp.arrived == 0)
    warp.line = line;
  else if (line != warp.line)
    elsewhere("warp", line, warp.line);
  auto* const values = warp.values[warp.passed % 2];
  std::memcpy(values[lane], mine, bytes);
  warp.arrived |= 1u << lane;
  self().line = line;
  if (warp.arrived != ~0u) {
    pause(Waits::warp, warp.passed + 1);
  } else {
    warp.arrived = 0;
    ++warp.passed;
  }
  return {values};
}

}  // namespace emulated
