// Buffers, shared memory, and the checks of every access; see machine.h.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

#include "state.h"

namespace oases::cuda {
// Dynamic shared memory: the array that shared_memory() of csrc/device.h declares.
thread_local __attribute__((aligned(16))) unsigned char bytes[emulated::kSharedBytes];
}  // namespace oases::cuda

namespace emulated {
namespace {

bool same_thread(const Access& a, const Access& b) {
  return a.block == b.block && a.warp == b.warp && a.lane == b.lane && a.lane != kSeveral;
}

// Whether a barrier lies between `before` and `now`, or they need none.
bool ordered(const Access& before, const Access& now) {
  if (before.launch != now.launch || same_thread(before, now) || (before.atomic && now.atomic)) return true;
  if (before.block != now.block) return false;
  return before.of_block < now.of_block || (before.warp == now.warp && before.of_warp < now.of_warp);
}

std::string thread_of(const Access& access) {
  return "block " + std::to_string(access.block) + ", warp " + std::to_string(access.warp) +
         (access.lane == kSeveral ? std::string(", several lanes") : ", lane " + std::to_string(access.lane));
}

void note_read(Cell& cell, const Access& now) {
  Access* free = nullptr;
  for (Access& read : cell.reads) {
    if (read.launch == now.launch && read.block == now.block && read.warp == now.warp) {
      const bool at_once = read.of_block == now.of_block && read.of_warp == now.of_warp;
      if (!at_once)
        read = now;
      else if (read.lane != now.lane)
        read.lane = kSeveral;
      return;
    }
    if (ordered(read, now)) free = &read;
  }
  if (free) *free = now;
}

void check_cell(Cell& cell, const Access& now, Use use, const void* from) {
  if (use != Use::write && !cell.written) fault("a read of memory that nobody has written", from);
  if (!ordered(cell.write, now))
    fault(std::string("a race: ") + (use == Use::read ? "a read" : "a write") +
              " without a barrier since the write of " + thread_of(cell.write),
          from);
  if (use == Use::read) return note_read(cell, now);
  for (const Access& read : cell.reads)
    if (!ordered(read, now))
      fault("a race: a write without a barrier since the read of " + thread_of(read), from);
  cell.write = now;
  cell.reads[0] = cell.reads[1] = {};
  cell.written = true;
}

void check_region(Region& region, const unsigned char* at, size_t bytes, Use use, const void* from) {
  if (region.kind == Kind::input) {
    if (use != Use::read) fault("a write to an input", from);
    return;
  }
  const unsigned index = here.index;
  const Access now{m.launch,
                   m.block,
                   m.passed,
                   m.warps[index / 32].passed,
                   static_cast<uint16_t>(index / 32),
                   static_cast<uint8_t>(index % 32),
                   use == Use::atomic};
  const size_t offset = static_cast<size_t>(at - region.begin);
  for (size_t cell = offset / region.grain; cell <= (offset + bytes - 1) / region.grain; ++cell)
    check_cell(region.cells[cell], now, use, from);
}

Region* region_of(const unsigned char* at, size_t bytes) {
  static size_t last = 0;
  if (last < m.regions.size() && m.regions[last].holds(at, bytes)) return &m.regions[last];
  for (size_t i = 0; i < m.regions.size(); ++i)
    if (m.regions[i].holds(at, bytes)) return &m.regions[last = i];
  return nullptr;
}

void check_access(const void* address, size_t bytes, Use use, const void* from) {
  const auto* at = static_cast<const unsigned char*>(address);
  const Fiber& fiber = self();
  if (at >= fiber.stack.get() && at + bytes <= fiber.stack.get() + kStack) return;
  // threadIdx and its like, and values of lanes.
  const auto within = [&](const void* begin, const void* end) { return address >= begin && address < end; };
  if (use == Use::read &&
      (within(&here, &here + 1) || within(m.warps.data(), m.warps.data() + m.warps.size())))
    return;
  if (m.shared.holds(at, bytes)) {
    const unsigned char* const dynamic = oases::cuda::bytes;
    if (at + bytes > dynamic && at < dynamic + kSharedBytes &&
        (at < dynamic || at + bytes > dynamic + m.dynamic_bytes))
      fault("an access outside the " + std::to_string(m.dynamic_bytes) + " bytes of dynamic shared memory",
            from);
    return check_region(m.shared, at, bytes, use, from);
  }
  if (Region* region = region_of(at, bytes)) return check_region(*region, at, bytes, use, from);
  // Arguments of the kernel lie on the launcher's stack.
  if (use == Use::read && at >= m.host_stack && at < m.host_stack + 4096) return;
  std::string nearest;
  for (const Region& region : m.regions)
    if (at + bytes > region.begin - kGuard && at < region.begin + region.bytes + kGuard)
      nearest = ": " + std::to_string(at - region.begin) + " of a buffer of " + std::to_string(region.bytes) +
                " bytes";
  fault(std::string(use == Use::read ? "a read" : "a write") + " of " + std::to_string(bytes) +
            " bytes out of bounds" + nearest,
        from);
}

}  // namespace

// The segment of this library's thread_local variables, which are the kernels' shared memory and nothing else.
void find_shared_memory() {
  struct Found {
    unsigned char* begin = nullptr;
    size_t bytes = 0;
  } found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        auto& found = *static_cast<Found*>(to);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          auto* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
          const size_t bytes = info->dlpi_phdr[i].p_memsz;
          if (info->dlpi_phdr[i].p_type == PT_TLS && begin && oases::cuda::bytes >= begin &&
              oases::cuda::bytes < begin + bytes)
            found = {begin, bytes};
        }
        return 0;
      },
      &found);
  if (!found.begin) throw std::runtime_error("emulated: no segment of shared memory");
  m.shared.begin = found.begin;
  m.shared.bytes = found.bytes;
}

void check_accesses(bool on) { m.checks = on; }

void access(const void* address, size_t bytes, Use use, const void* from) {
  if (!m.running || !m.checks) return;
  m.checks = false;  // the linker may have taken the kernels' copy, with checks, of a function of std
  check_access(address, bytes, use, from);
  m.checks = true;
}

void* place(void* from, size_t bytes, size_t grain, Kind kind) {
  if (!from) return nullptr;
  if (!m.arena)
    m.arena = static_cast<unsigned char*>(
        mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  m.used = (m.used + kGuard + 255) / 256 * 256;
  unsigned char* const begin = m.arena + m.used + reinterpret_cast<uintptr_t>(from) % 256;
  m.used += bytes + 256;
  auto* const home = static_cast<unsigned char*>(from);
  kind == Kind::output ? std::memset(begin, 0xff, bytes) : std::memcpy(begin, from, bytes);
  Region region{begin, bytes, grain, kind, kind == Kind::input ? nullptr : home, {}};
  if (kind != Kind::input) {
    region.cells.resize((bytes + grain - 1) / grain);
    for (Cell& cell : region.cells) cell.written = kind == Kind::both;
  }
  m.regions.push_back(std::move(region));
  return begin;
}

void finish(const char* name) {
  for (const Region& region : m.regions) {
    if (!region.home) continue;
    const auto missing = std::count_if(region.cells.begin(), region.cells.end(),
                                       [](const Cell& cell) { return !cell.written; });
    if (missing)
      throw std::runtime_error(std::string("emulated: ") + name + " left " +
                               std::to_string(missing * region.grain) + " of " +
                               std::to_string(region.bytes) + " bytes of an output unwritten");
    std::memcpy(region.home, region.begin, region.bytes);
  }
  forget();
}

void forget() {
  m.regions.clear();
  m.used = 0;
}

void host_copy(void* to, const void* from, size_t bytes) {
  Region *target = region_of(static_cast<unsigned char*>(to), bytes),
         *source = region_of(static_cast<const unsigned char*>(from), bytes);
  if (!target || !source || target->kind == Kind::input)
    throw std::runtime_error("emulated: cudaMemcpyAsync");
  std::memcpy(to, from, bytes);
  const size_t first = (static_cast<unsigned char*>(to) - target->begin) / target->grain;
  for (size_t i = 0; i < bytes / target->grain; ++i) target->cells[first + i].written = true;
}

void host_fill(void* to, int value, size_t bytes) {
  Region* target = region_of(static_cast<unsigned char*>(to), bytes);
  if (!target || target->kind == Kind::input) throw std::runtime_error("emulated: cudaMemsetAsync");
  std::memset(to, value, bytes);
  const size_t first = (static_cast<unsigned char*>(to) - target->begin) / target->grain;
  for (size_t i = 0; i < bytes / target->grain; ++i) target->cells[first + i].written = true;
}

}  // namespace emulated
