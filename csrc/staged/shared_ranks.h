// Memory that the ranks of one machine share, and how they wait there for one another.
//
// The memory has no name (memfd): it ends with the last process that has it, after kill -9 too, and other users cannot
// open it. Ranks work in steps. In step s a rank writes its slot and its part of the result of step s, and reads what
// others wrote in step s - 1; it arrives at the end of the step, and goes on once all have. So two copies of each slot
// are enough, and nobody overwrites what is still read.
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "descriptions.h"
#include "shared_memory.h"

namespace oases {

// A word in shared memory on which threads of all ranks sleep.
class Bell {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  // What was written before is seen by those who see the new value.
  void set(uint32_t value);
  void ring();
  // For those who look at other things as well. One that is about to sleep may miss it.
  void wake();
  // Returns when the value is no longer `seen`, after `limit`, or for no reason.
  void wait(uint32_t seen, std::chrono::nanoseconds limit, int spins);

 private:
  std::atomic<uint32_t> word_, sleepers_;
};

// How long an operation may wait, and what its errors call it. idle: its rank has nothing else to do meanwhile.
struct Patience {
  Patience(std::string operation, std::chrono::milliseconds timeout, bool idle = false)
      : operation(std::move(operation)),
        timeout(timeout),
        end(std::chrono::steady_clock::now() + timeout),
        idle(idle) {}
  bool over() const { return std::chrono::steady_clock::now() >= end; }

  std::string operation;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point end;
  bool idle;
};

class SharedRanks {
 public:
  // Collective; raises ValueError where ranks are on several machines, DistBackendError where one ends or is missing.
  // names: by which errors call ranks; empty: their numbers.
  SharedRanks(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              std::chrono::milliseconds timeout, std::vector<int64_t> names = {});
  // The other ranks' waits for this one end.
  ~SharedRanks();
  SharedRanks(const SharedRanks&) = delete;
  SharedRanks& operator=(const SharedRanks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t name(int rank) const { return names_.empty() ? rank : names_[rank]; }
  int64_t slot_bytes() const { return slot_bytes_; }

  uint32_t step() const { return step_; }
  // Ends the step: waits for all ranks. Raises DistBackendError when a rank has ended, or at a timeout.
  void meet(const Patience& patience);

  std::byte* slot(int rank, uint32_t step) const;
  std::byte* result(uint32_t step) const;
  // The description of a rank's collective number `turn`; and after it bytes sent to and received from each rank.
  Description* description(int rank, uint32_t turn) const;
  int64_t* counts(int rank, uint32_t turn) const;

  // Messages from one rank to another.
  std::byte* channel(int from, int to) const;
  Bell& mail_bell(int rank) const;

  // Memory for tensors of devices (device_area.h): of collectives, and of messages from one rank to another.
  std::byte* device_area() const { return memory_.get() + device_area_at_; }
  std::byte* message_area(int from, int to) const {
    return memory_.get() + message_areas_at_ + (from * size_ + to) * message_area_bytes_;
  }

  // Why a rank will never act again, or "".
  std::string gone(int rank) const;
  // Why the group was given up, or "".
  std::string broken() const;
  // Raises DistBackendError where it was.
  void check_whole() const;
  // Ends every wait of all ranks, with this reason unless another one was given before.
  void break_group(const std::string& reason);

 private:
  struct Control;
  struct Board;
  struct Join;
  void lay_out();
  void open(Join& join);
  // Breaks the group and raises the reason.
  [[noreturn]] void give_up(const std::string& reason);
  Control& control() const;
  Board& board(int rank) const;
  std::string look_for_lost() const;
  std::string missing() const;

  const int rank_, size_;
  const std::vector<int64_t> names_;
  const int spins_, idle_spins_;
  int64_t slot_bytes_ = 0, boards_at_ = 0, descriptions_at_ = 0, description_stride_ = 0, channels_at_ = 0;
  int64_t slots_at_ = 0, device_area_at_ = 0, message_areas_at_ = 0, message_area_bytes_ = 0, bytes_ = 0;
  uint32_t step_ = 0;
  std::vector<Process> processes_;
  std::shared_ptr<std::byte> memory_;
};

// A channel: messages in frames.
struct Frame {
  int64_t tag, total, bytes;
  at::ScalarType type;
};
struct Channel {
  static constexpr uint32_t kFrames = 4;
  static constexpr int64_t kFrameBytes = 128 << 10;
  alignas(64) std::atomic<uint32_t> written;
  alignas(64) std::atomic<uint32_t> read;
  Frame frames[kFrames];
  alignas(64) std::byte data[kFrames][kFrameBytes];
};

}  // namespace oases
