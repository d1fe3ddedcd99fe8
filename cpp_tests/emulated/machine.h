// CUDA's execution model on one CPU thread. Every CUDA thread of a block is a fiber; blocks run one after
// another. The kernels are compiled with -fsanitize=thread, which puts a call before every access to memory,
// and -fsanitize=alignment,bounds,shift; the calls are answered here and not by a sanitizer's library. A
// fault ends the launch with a std::runtime_error that names what, which thread of which block, and the line:
//   - accesses outside every buffer and outside the block's shared memory, writes to inputs;
//   - addresses that are not aligned for the access;
//   - reads of shared memory or of outputs that nobody has written;
//   - races: two threads, one of which writes, with no barrier (of the block, or of their warp) between;
//   - barriers and warp intrinsics that not all threads reach, or that they reach at different lines;
//   - launches that no GPU would start, and outputs that are not written whole.
// What it cannot show: speed, the memory model between blocks beyond plain conflicts, CUDA's own tanhf, PTX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

constexpr int kSharedBytes = 99 << 10;  // of a block on sm_86, sm_89 and sm_120, the least of all

// The running thread.
struct Place {
  dim3 thread, block, block_size, grid_size;
  unsigned index;  // of the thread in its block
  int lane() const { return static_cast<int>(index % 32); }
};
extern Place here;

enum class Use { read, write, atomic };
// What the compiler's calls end in; `from` is the address of the code.
void access(const void* at, size_t bytes, Use use, const void* from);
// Ends the launch.
[[noreturn]] void fault(const std::string& what, const void* from = nullptr);

void launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);
void wait_for_block(int line);

// The values of the 32 lanes, which have all come here with `mine`.
struct Lanes {
  const unsigned char (*bytes)[16];
};
Lanes exchange_bytes(unsigned mask, const void* mine, size_t bytes, int line);
template <typename T>
struct LanesOf {
  Lanes lanes;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, lanes.bytes[lane], sizeof value);
    return value;
  }
};
template <typename T>
LanesOf<T> exchange(unsigned mask, const T& mine, int line) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  return {exchange_bytes(mask, &mine, sizeof mine, line)};
}

// Runs f without checks: the emulation's own accesses.
void check_accesses(bool on);
template <typename F>
auto unchecked(F f) {
  check_accesses(false);
  const auto result = f();
  check_accesses(true);
  return result;
}

// ---- device memory: a buffer has a guard of unmapped addresses' size on both sides

enum class Kind { input, output, both };  // output: not initialised, and must be written whole
// A buffer with the bytes of `from`, aligned as that is; null for null. `grain` divides every access: races
// and missing writes are found by so many bytes.
void* place(void* from, size_t bytes, size_t grain, Kind kind);
// Looks for outputs that are not whole, copies outputs back and forgets all buffers.
void finish(const char* name);
void forget();
void host_copy(void* to, const void* from, size_t bytes);
void host_fill(void* to, int value, size_t bytes);

}  // namespace emulated
