// `staged` over several machines: a c10d backend that sums and gathers in each machine's shared memory, and sends what
// is left between machines through sockets. Of an all-reduce of n bytes over M machines, 2 (M - 1) / M n cross a
// machine's link, however many ranks it has; a ring over all ranks sends up to twice as much.
#pragma once

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "descriptions.h"
#include "staged_backend.h"
#include "worker.h"

namespace oases {

// Of CPU tensors. Sums, gathers and barriers run one after another on a thread of the backend, in the order of the
// calls, and their results are equal on all ranks to the bit. What is sent between two ranks of a machine goes through
// its memory, and all else through the sockets.
//
// A sum or gather that is wrong on one rank, or another one on a rank than on others of its machine, is a ValueError on
// all ranks of that machine. Other machines wait for it until their timeout, and cannot take what follows there for it.
// Any other error ends the waits of the machine's ranks, and the group is of no use after that.
class NodesBackend : public c10d::Backend {
 public:
  // whole: of all ranks. local: of this machine's ranks. across: of the ranks with this one's place, on every machine.
  // ranks: [machine][place].
  NodesBackend(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<StagedBackend> local,
               c10::intrusive_ptr<c10d::Backend> across, std::vector<std::vector<int64_t>> ranks);

  const std::string getBackendName() const override { return "staged"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  // Ends the waits of this machine's ranks for one another, and this rank's in sums, gathers and barriers for other
  // machines. What gloo makes alone waits on: it has no abort.
  void abort() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Exchange;
  struct Piece;
  struct Peer {
    c10d::Backend* by;
    int rank;
  };
  // By which backend a rank is sent to, and its rank there.
  Peer peer(int rank) const;
  // Of `rows` [rank, ...], those of a machine's ranks.
  Tensors of_ranks(const at::Tensor& rows, int node) const;
  // check: raises where this rank cannot make the call; the machine's others then raise that, too.
  Work enqueue(c10d::OpType type, const char* name, Tensors outputs, std::chrono::milliseconds timeout,
               std::function<void()> check, std::function<void()> run);
  // Raises ValueError on all ranks of this machine where their calls differ.
  void compare(Description own, std::chrono::milliseconds timeout);
  // What the worker waits for from now on, or null. Raises DistBackendError once the group was aborted.
  void note_wait(Work message);
  void add_parts(const at::Tensor& own, const at::Tensor& parts, const at::Tensor& sum,
                 const c10d::ReduceOp& reduce) const;
  void sum(const at::Tensor& tensor, const c10d::ReduceOp& reduce, std::chrono::milliseconds timeout);
  // Counts a call, and returns what makes it. used: its tensors. Of the callers' thread, as gloo is: it numbers its
  // messages by the order of the calls.
  c10d::Backend& whole(const char* name, const Tensors& used);

  const c10::intrusive_ptr<c10d::Backend> whole_, across_;
  const c10::intrusive_ptr<StagedBackend> local_;
  const std::vector<std::vector<int64_t>> ranks_;
  std::atomic<uint64_t> started_{0},
      enqueued_{0};  // calls: all, and those of the worker, which number its messages
  // Of messages; kNoTimeout until it is set: gloo's own, which its messages keep when it is given another.
  std::atomic<std::chrono::milliseconds> timeout_{kNoTimeout};
  // Of the worker's thread: the number of its call, and exchanges in it so far.
  uint64_t call_ = 0, exchanges_ = 0;
  std::mutex mutex_;  // of the two that follow
  Work waited_for_;
  bool aborted_ = false;
  Worker worker_;  // last member: its thread reads the others
};

}  // namespace oases
