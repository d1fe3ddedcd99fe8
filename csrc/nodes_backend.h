// `staged` over several machines: a c10d backend that sums and gathers in each machine's shared memory, and sends what
// is left between machines through sockets. Of an all-reduce of n bytes over M machines, 2 (M - 1) / M n cross a
// machine's link, however many ranks it has; a ring over all ranks sends up to twice as much.
#pragma once

#include <atomic>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "worker.h"

namespace oases {

// Of CPU tensors. Sums and gathers run one after another on a thread of the backend, in the order of the calls, and
// their results are equal on all ranks to the bit. What is sent between two ranks of a machine goes through its memory,
// and all else through the sockets.
class NodesBackend : public c10d::Backend {
 public:
  // whole: of all ranks. local: of this machine's ranks. across: of the ranks with this one's place, on every machine.
  // ranks: [machine][place].
  NodesBackend(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<c10d::Backend> local,
               c10::intrusive_ptr<c10d::Backend> across, std::vector<std::vector<int64_t>> ranks);

  const std::string getBackendName() const override { return "staged"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  // Ends the waits of this machine's ranks.
  void abort() override { local_->abort(); }

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
  Work enqueue(c10d::OpType type, Tensors outputs, std::function<void()> run);
  void add_parts(const at::Tensor& own, const at::Tensor& parts, const at::Tensor& sum,
                 const c10d::ReduceOp& reduce) const;
  void sum(const at::Tensor& tensor, const c10d::ReduceOp& reduce, std::chrono::milliseconds timeout);
  // Counts and returns it.
  c10d::Backend& whole();

  const c10::intrusive_ptr<c10d::Backend> whole_, local_, across_;
  const std::vector<std::vector<int64_t>> ranks_;
  std::atomic<uint64_t> started_{0};
  uint32_t exchanges_ = 0;  // of the worker's thread
  Worker worker_;           // last member: its thread reads the others
};

}  // namespace oases
