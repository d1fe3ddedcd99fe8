// Collectives over several machines: sums and gathers in each machine's shared memory, and messages between machines
// through sockets. Of an all-reduce of n bytes over M machines, 2 (M - 1) / M n cross a machine's link, however many
// ranks it has; a ring over all ranks sends up to twice as much.
#pragma once

#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "descriptions.h"
#include "staged_backend.h"

namespace oases {

// Of host tensors, on one thread, one collective after another. Results are equal on all ranks to the bit. A rank has a
// place on its machine, and parts go between the ranks of a place. Other calls on a rank than on others of its machine
// are a ValueError on all of them, before any has sent; other machines wait for them until their timeout, and cannot
// take what follows there for it.
class NodesCollectives {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Timeout = std::chrono::milliseconds;
  // Messages that callers send share sockets with what is sent here. Theirs have tags below kDeviceTag, which those of
  // tensors of devices have: they are taken in the order of the calls, as NCCL's.
  static constexpr int kTags = 1 << 30, kDeviceTag = kTags - 1;

  // whole: of all ranks. local: of this machine's ranks. ranks: [machine][place].
  NodesCollectives(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<StagedBackend> local,
                   std::vector<std::vector<int64_t>> ranks);

  // The collective with this number, on all ranks.
  void begin(uint64_t call) { call_ = call, exchanges_ = 0; }
  // Whether it has sent anything to other machines.
  bool has_sent() const { return exchanges_ > 0; }
  // Makes, in place of one that this rank was refused, an error of all ranks of the machine.
  void refuse(const char* name, const std::string& reason, Timeout timeout);
  // Ends the waits of this machine's ranks for one another, and this rank's for other machines.
  void abort();

  void all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& reduce, Timeout timeout);
  // all: [rank, ...], of as many bytes as `own` each. root: for whom, or -1: for all.
  void all_gather(const at::Tensor& all, const at::Tensor& own, int root, Timeout timeout);
  // rows: [rank, ...], summed to `own`.
  void reduce_scatter(const at::Tensor& rows, const at::Tensor& own, const c10d::ReduceOp& reduce,
                      Timeout timeout);
  // inputs: of each rank, on the root.
  void scatter(const at::Tensor& output, const Tensors& inputs, int root, Timeout timeout);
  void broadcast(const at::Tensor& tensor, int root, Timeout timeout);
  // To and from each rank.
  void all_to_all(const Tensors& outputs, const Tensors& inputs, Timeout timeout);
  void barrier(Timeout timeout);

  // By which backend a rank is sent to, and its rank there.
  struct Peer {
    c10d::Backend* by;
    int rank;
  };
  Peer peer(int rank) const;
  // Raises DistBackendError with the rank's number where its message does not come.
  void wait_for(int64_t rank, c10d::Work& message, Timeout timeout) const;
  bool here(int rank) const { return at_[rank].first == here_; }
  void set_timeout(Timeout timeout);

 private:
  struct Exchange;
  struct Piece;
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Messages = std::vector<std::pair<int64_t, at::Tensor>>;  // rank, bytes
  // Of tensors by machine: messages to or from the ranks of this place there; without this machine's.
  Messages of_place(const Tensors& by_machine) const;
  // Of tensors by rank, those of a machine's ranks.
  Tensors of_ranks(const Tensors& by_rank, int64_t machine) const;
  // A step of the machine's ranks alone, so that a difference is an error of all before any has sent anything.
  void compare(Description own, Timeout timeout);
  // What is waited for from now on, or null. Raises DistBackendError once the group was aborted.
  void note_wait(Work message);
  void add_parts(const at::Tensor& own, const at::Tensor& parts, const at::Tensor& sum,
                 const c10d::ReduceOp& reduce) const;

  const c10::intrusive_ptr<c10d::Backend> whole_;
  const c10::intrusive_ptr<StagedBackend> local_;
  const std::vector<std::vector<int64_t>> ranks_;
  std::vector<std::pair<int64_t, int64_t>> at_;  // machine and place of each rank
  const int64_t machines_;
  int64_t here_, place_;
  uint64_t call_ = 0, exchanges_ = 0;  // exchanges: in this call so far
  std::mutex mutex_;                   // of the two that follow
  Work waited_for_;
  bool aborted_ = false;
};

}  // namespace oases
