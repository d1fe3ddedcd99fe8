// Words of host memory that the streams of an accelerator write and wait for, without the host and without a kernel.
// Includes only what a device that is no part of this project needs in order to bring its own.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace oases {

// Of a type of device; called by several threads.
class StreamWords {
 public:
  virtual ~StreamWords() = default;

  // Lets the current device copy from and to this memory while the host goes on, and its streams use words in it.
  virtual void add_memory(std::byte* memory, int64_t bytes) = 0;
  // Once no stream uses it.
  virtual void remove_memory(std::byte* memory) = 0;

  // Writes the word once all that is queued on the stream has been done. Who sees the word sees that, too.
  virtual void write(const c10::Stream& stream, uint32_t* word, uint32_t value) = 0;
  // Holds the stream until the word has come to `value` or beyond, modulo 2^32.
  virtual void wait(const c10::Stream& stream, const uint32_t* word, uint32_t value) = 0;
};

// Whether a word has come to `value`.
inline bool reached(uint32_t word, uint32_t value) { return static_cast<int32_t>(word - value) >= 0; }

// For all streams of devices of that type, for as long as the process lives.
void register_stream_words(c10::DeviceType type, StreamWords* words);
// Raises ValueError where streams of such devices cannot wait for words.
StreamWords& stream_words_of(c10::DeviceType type);

}  // namespace oases
