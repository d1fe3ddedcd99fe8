// `staged` over several machines: a c10d backend by the shared memory of each and sockets between them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "host_passage.h"
#include "nodes_collectives.h"
#include "worker.h"

namespace oases {

// Collectives run one after another on a thread of the backend, in the order of the calls (nodes_collectives.h); those of
// tensors of a device on their copies in pinned memory of the host (host_passage.h). What is sent between two ranks of a
// machine goes through its memory, and else through a socket.
//
// A collective that is wrong on one rank, or another one on a rank than on others of its machine, is a ValueError on all
// ranks of that machine, raised by the wait; of tensors of a device by the call, where this rank's is wrong. Any other
// error, and any whose tensors of a device are on the way, ends the waits of the machine's ranks, and the group is of no
// use after that.
class NodesBackend : public c10d::Backend {
 public:
  // whole: of all ranks. local: of this machine's ranks. ranks: [machine][place].
  NodesBackend(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<StagedBackend> local,
               std::vector<std::vector<int64_t>> ranks);
  ~NodesBackend() override;

  const std::string getBackendName() const override { return "staged"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  // Ends what waits in collectives, in messages within the machine and in those of devices. What gloo sends alone waits
  // on: it has no abort.
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
  struct Call {
    c10d::OpType type;
    const char* name;
    Tensors outputs, inputs;
    std::chrono::milliseconds timeout;
    std::function<void()>
        check;  // raises where this rank cannot make the call; the machine's others then raise it, too
    HostPassage::Call run;
    std::vector<Work> before = {};  // works whose failures are this one's, too
  };
  // Messages of tensors of a device with one rank, in one direction.
  struct Line {
    explicit Line(c10::Device device) : passage(device) {}
    void wait_for(const NodesCollectives& collectives, int rank, Work message);
    void abort();
    HostPassage passage;
    std::mutex mutex;  // of the two that follow
    Work waited_for;
    bool aborted = false;
    Worker worker;  // last member: its thread reads the others
  };

  Work enqueue(const Call& call) { return enqueue(call, call.outputs); }
  // results: of the work.
  Work enqueue(Call call, Tensors results);
  Work gather_all(c10d::OpType type, const char* name, const Tensors& outputs, const Tensors& inputs,
                  int root, std::chrono::milliseconds timeout);
  Work message(const char* name, Tensors& tensors, int other, int tag, bool sends);
  // Makes it, where there is none. Raises ValueError where it cannot be, or is on another device.
  void passage_on(c10::Device device);
  void check_same_device(const HostPassage& passage, c10::Device device) const;
  void abort_messages();
  void check_root(const char* name, int64_t root) const;

  NodesCollectives collectives_;
  std::atomic<uint64_t> started_{0};
  std::mutex mutex_;                                             // of the two that follow
  std::unique_ptr<HostPassage> passage_;                         // from the first collective of a device on
  std::map<std::pair<int, bool>, std::unique_ptr<Line>> lines_;  // by rank, and whether it is sent to
  Worker worker_;                                                // last member: its thread reads the others
};

}  // namespace oases
