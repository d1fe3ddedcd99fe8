// The calls that -fsanitize=thread,alignment,bounds,shift puts into the kernels; see machine.h.
#include <cstdio>
#include <stdexcept>

#include "state.h"

using emulated::access;
using emulated::Use;

extern "C" {
#define EMULATED_ACCESS(size)                                                                              \
  void __tsan_read##size(void* at) { access(at, size, Use::read, __builtin_return_address(0)); }           \
  void __tsan_write##size(void* at) { access(at, size, Use::write, __builtin_return_address(0)); }         \
  void __tsan_unaligned_read##size(void* at) { access(at, size, Use::read, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##size(void* at) { access(at, size, Use::write, __builtin_return_address(0)); }
EMULATED_ACCESS(1)
EMULATED_ACCESS(2)
EMULATED_ACCESS(4)
EMULATED_ACCESS(8)
EMULATED_ACCESS(16)
void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, Use::read, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t bytes) {
  access(at, bytes, Use::write, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

namespace {
// libubsan's data, of which only this is read.
struct Source {
  const char* file;
  uint32_t line, column;
};
[[noreturn]] void undefined(const Source* source, const char* what) {
  emulated::check_accesses(false);
  const std::string file = source->file;
  const std::string text =
      std::string(what) + " at " + file.substr(file.rfind('/') + 1) + ":" + std::to_string(source->line);
  if (!emulated::m.running) throw std::runtime_error("emulated: in a launcher: " + text);
  emulated::fault(text);
}
}  // namespace
void __ubsan_handle_type_mismatch_v1(Source* source, void* at) {
  char text[64];
  snprintf(text, sizeof text, "an address that is not aligned (%p)", at);
  undefined(source, text);
}
void __ubsan_handle_out_of_bounds(Source* source, size_t index) {
  char text[64];
  snprintf(text, sizeof text, "index %zu out of bounds of its array", index);
  undefined(source, text);
}
void __ubsan_handle_shift_out_of_bounds(Source* source, size_t, size_t) {
  undefined(source, "a shift by more bits than there are");
}
}
