// `staged`: a c10d backend for ranks of one machine, through memory that they share instead of sockets.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "local_work.h"
#include "staged_collectives.h"
#include "staged_mail.h"
#include "staged_streams.h"

namespace oases {

// Collectives of CPU tensors run in the order of the calls: on a thread of the backend, or, where the caller waits anyway
// and nothing is queued, on the caller's. Arguments are checked there: a call that is wrong on one rank is an error on
// all, raised by the wait. Those of tensors of a device are queued on streams by the call, which checks them
// (staged_streams.h). A rank that ends, leaves or times out ends the waits of all others with a DistBackendError that
// names it, and the group is of no use after that.
class StagedBackend : public c10d::Backend {
 public:
  // Collective. timeout: of operations that are given none. names: by which errors call ranks; empty: their numbers.
  StagedBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                std::chrono::milliseconds timeout, std::vector<int64_t> names = {});
  // Runs what is queued.
  ~StagedBackend() override;

  const std::string getBackendName() const override { return "staged"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Of collectives started here, on every rank as many.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }
  // Ends the waits of all ranks.
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
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  // Joins the others' collective of CPU tensors in place of one that cannot be made here: all ranks raise the reason.
  Work refuse(const char* name, const std::string& reason, std::chrono::milliseconds timeout);

 private:
  struct Job {
    c10::intrusive_ptr<LocalWork> work;
    std::function<void(bool idle)> run;
  };
  // How to run an operation: its options, in whatever struct of c10d.
  struct How {
    template <typename Options>
    explicit How(const Options& options) : timeout(options.timeout), async(options.asyncOp) {}
    std::chrono::milliseconds timeout;
    bool async;
  };
  using Run = std::function<void(Collectives&, const Patience&)>;
  // used: all tensors, of which those of a device decide how it runs.
  Work enqueue(c10d::OpType type, const char* name, How how, Tensors outputs, const Tensors& used, Run run);
  StagedStreams& streams(const char* name, c10::Device device);
  // Those of messages of a device from one rank to another.
  StagedStreams& message_streams(const char* name, c10::Device device, int from, int to);
  // `streams`, made if there are none; an error there breaks the group. Call with mutex_ held.
  StagedStreams& made(const char* name, std::unique_ptr<StagedStreams>& streams,
                      const std::function<std::unique_ptr<StagedStreams>()>& make);
  // sends: or receives. other: the rank at the other end.
  Work message(const char* name, const at::Tensor& tensor, int other, int tag, bool sends);
  void serve();
  // Throws in a fork of the process that made the group: a fork has neither its threads nor its memory.
  void check_process(const char* name) const;
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  StagedMail& mail();
  void check_root(const char* name, int64_t root) const;
  // What follows checks its arguments; name: of the collective in errors. root: the only rank to get the result, or -1.
  static void reduce_all(Collectives& collectives, const char* name, const Tensors& tensors,
                         ReduceType reduce, int64_t root, const Patience& patience);
  static void gather_tensors(Collectives& collectives, const char* name, const Tensors& targets,
                             const Tensors& inputs, int root, const Patience& patience);

  const pid_t process_ = getpid();
  const std::shared_ptr<SharedRanks> ranks_;
  StagedCollectives collectives_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> started_{0};
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::deque<Job> queue_;
  bool busy_ = false, closing_ = false;
  std::unique_ptr<StagedMail> mail_;        // from the first message on
  std::unique_ptr<StagedStreams> streams_;  // from the first collective of a device on
  std::map<std::pair<int, int>, std::unique_ptr<StagedStreams>> message_streams_;  // by sender and receiver
  std::thread thread_;  // last member: the thread reads the others
};

}  // namespace oases
