// Words of host memory by the driver of CUDA, which throw where it refuses. Includes neither torch nor CUDA headers.
#pragma once

#include <cstdint>

namespace oases::cuda {

// Memory of this process that all devices may use, from the start of a page on.
void register_memory(void* memory, int64_t bytes);
void unregister_memory(void* memory);
// In the order of the stream. A wait holds the stream until the word has come to `value` or beyond, modulo 2^32.
void write_word(uint32_t* word, uint32_t value, void* stream);
void wait_for_word(const uint32_t* word, uint32_t value, void* stream);

}  // namespace oases::cuda
