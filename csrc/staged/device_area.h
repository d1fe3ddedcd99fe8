// A part of a group's shared memory by which devices move tensors, those of all ranks or of two: slots of each rank for
// pieces of them, words that streams write and wait for, and what hosts say of the collectives that they queue.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "descriptions.h"

namespace oases {

// Pieces of all collectives are numbered from 1 on, alike on all its ranks, which count from 0 on.
class DeviceArea {
 public:
  // Copies of a rank's slot: pieces under way.
  static constexpr uint32_t kSlots = 4;
  // Collectives, and all-to-alls among them, that a host may have queued before the slowest host has.
  static constexpr uint32_t kAhead = 1024, kAllToAllsAhead = 64;

  // The latest piece of which a rank has written its slot, has written its part of the sum there, and reads the
  // others' slots no longer.
  struct Words {
    alignas(64) uint32_t put;
    alignas(64) uint32_t summed;
    alignas(64) uint32_t done;
  };
  // Pieces of all-to-alls that a rank has queued so far, to and from each other rank: each two count theirs alone.
  struct Pairs {
    std::vector<uint32_t> given, taken;
  };

  // Bytes of all slots at most: of a group, and of messages from one rank to another in a group of `size`.
  static constexpr int64_t kAllSlots = 64 << 20;
  static int64_t message_slots(int size) { return size <= 32 ? 8 << 20 : 1 << 20; }

  static int64_t bytes_for(int size, int64_t all_slots);
  // ranks: by which errors call them.
  DeviceArea(std::byte* start, std::vector<int> ranks, int64_t all_slots);
  int size() const { return size_; }
  const std::vector<int>& ranks() const { return ranks_; }

  // For the device: words and slots.
  std::byte* memory() const { return memory_; }
  int64_t memory_bytes() const;

  int64_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(int rank, uint32_t piece) const;
  Words& words(int rank) const;
  // Of all-to-alls: the latest piece that a rank has written to its slot for another one, and has read from the other's.
  uint32_t* given(int rank, int to) const { return pair_words(2 * rank) + to; }
  uint32_t* taken(int rank, int from) const { return pair_words(2 * rank + 1) + from; }
  // A word as a host reads it while a device writes.
  static uint32_t value(uint32_t& word) {
    return std::atomic_ref<uint32_t>(word).load(std::memory_order_acquire);
  }

  // Whether all ranks have said and compared so much that a rank may say its collective number `turn`.
  bool may_say(uint32_t turn) const;
  // What a rank is about to queue; reason: why it was refused.
  void say(int rank, uint32_t turn, const Description& description, const std::string& reason = "");
  // How that differs from what others have said of the same turn so far, or "". Of two ranks that differ, the one that
  // says it later finds it, before it has queued anything.
  std::string compare(int rank, uint32_t turn);

  // As may_say, say and compare, of the bytes that a rank sends to and receives from each in an all-to-all.
  bool may_say_counts(uint32_t number) const;
  void say_counts(int rank, uint32_t number, const std::vector<int64_t>& sent,
                  const std::vector<int64_t>& received);
  std::string compare_counts(int rank, uint32_t number);

  // Overwrites all slots with NaN: what streams read there after their waits were ended is not silently wrong.
  void poison();
  // Lets all waits up to that piece end, and those of a rank for pieces of all-to-alls. Again until no stream waits: a
  // device may write an earlier piece meanwhile.
  void end_waits(uint32_t last_piece, int rank, const Pairs& pairs);

 private:
  static constexpr int kReason = 256;
  struct Said {
    std::atomic<uint32_t> turns;  // the turn, plus 1
    Description description;
  };
  struct Host {
    alignas(64) std::atomic<uint32_t> compared;      // turns
    std::atomic<uint32_t> counted, counts_compared;  // all-to-alls
    char reason[kReason];
  };
  static int64_t host_bytes(int size);
  static int64_t piece_bytes(int size, int64_t all_slots);
  static int64_t pair_bytes(int size);
  uint32_t* pair_words(int row) const;
  int64_t* counts(int rank, uint32_t number) const;
  Host& host(int rank) const;
  Said& said(int rank, uint32_t turn) const;

  const std::vector<int> ranks_;
  const int size_;
  const int64_t slot_bytes_, bytes_;
  std::byte *const start_, *const memory_;
};

}  // namespace oases
