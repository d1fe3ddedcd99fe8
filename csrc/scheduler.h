// Starts collectives early and waits for them late. A collective is a ticket from its issue to its wait, and
// every ticket records its cost. Works with any c10d backend: on the CPU a wait blocks the caller, on an
// accelerator it makes the current stream wait.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace oases {

struct Judgement;

// Seconds of the monotonic clock of Python's time.perf_counter().
double monotonic_seconds();

// Cost of one collective. Times are monotonic seconds; 0 means "not yet".
struct TicketRecord {
  // "all_reduce", "all_reduce_max", "all_gather", "reduce_scatter" or "all_to_all"
  std::string collective;
  std::string label;        // set by the caller, e.g. the schedule op "F 3.1"
  int64_t bytes = 0;        // of the whole (gathered or unreduced) tensor; bytes sent of an all-to-all
  double issued = 0;        // when the collective was passed to the backend
  double finished = 0;      // when the backend reported its end, or if it cannot, when the wait ended
  double waited_from = 0;   // when the compute first needed the result
  double blocked_for = 0;   // how long the compute waited
  int64_t saved_bytes = 0;  // those of the tensor's own type, less `bytes`, by a wire
};

// Sums over finished tickets of one label.
struct LabelTotals {
  std::string collective;  // of the last ticket
  int64_t count = 0;
  int64_t bytes = 0;
  int64_t saved_bytes = 0;     // by quantisation
  double link_seconds = 0;     // from issue, or the end of the previous collective, to its end
  double blocked_seconds = 0;  // the compute waited
};

// Relative errors of the sums of one label that were sampled (quantized_backend.h): equal on all ranks
// on the CPU, and known to them at other times on an accelerator.
struct SumErrors {
  int64_t samples = 0;
  double sum = 0;
};

// A started collective. Keeps its tensors alive until the wait, so that no caching allocator reuses their
// memory while the collective still reads it.
class Ticket {
 public:
  TicketRecord record() const;

 private:
  friend class OverlapScheduler;
  struct Finish;  // written by the backend's thread

  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  TicketRecord record_;
  std::shared_ptr<Finish> finish_;
  bool waited_ = false;
  // Accelerators only: recorded on the compute stream at issue and around the wait, and on the scheduler's own
  // where the collective ends; read when they have passed.
  std::optional<c10::Event> at_issue_, before_wait_, after_wait_, end_;
  // After the wait the second is copied to the first.
  std::optional<std::pair<at::Tensor, at::Tensor>> part_;
};

// Issues the collectives of one process group in the order of the calls. Not thread-safe: two threads could
// issue in different orders on different ranks.
class OverlapScheduler {
 public:
  // An independent scheduler, which keeps the group alive.
  explicit OverlapScheduler(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // The scheduler shared by all ops and layers of the group with this c10d name.
  static std::shared_ptr<OverlapScheduler> of(const std::string& group_name);
  // The shared schedulers of all groups that exist, by the groups' names.
  static std::map<std::string, std::shared_ptr<OverlapScheduler>> all();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Collectives with `wire` run on the group of this name, of the same ranks: a QuantizedBackend's.
  void add_wire(const std::string& wire, const std::string& group_name);
  bool has_wire(const std::string& wire) const { return wires_.count(wire) > 0; }
  // Name of the group of a wire that has been added.
  const std::string& wire_group(const std::string& wire) const { return wires_.at(wire); }

  // All-reduce of `tensor` in place: sum, or maximum with `largest`. The tensor must be contiguous. residual: of
  // earlier sums on a wire, see QuantizedBackend::allreduce.
  std::shared_ptr<Ticket> all_reduce(const at::Tensor& tensor, const std::string& label = "",
                                     bool largest = false, const std::string& wire = "",
                                     const std::optional<at::Tensor>& residual = std::nullopt);
  // Fills `output` (size() times as large) with every rank's `input`, in rank order.
  std::shared_ptr<Ticket> all_gather(const at::Tensor& output, const at::Tensor& input,
                                     const std::string& label = "", const std::string& wire = "");
  // Sums `input` over the group and writes this rank's shard, the rank-th of size(), to `output`.
  std::shared_ptr<Ticket> reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                         const std::string& label = "", const std::string& wire = "");

  // Sends each rank its rows of `input`, rank 0's first, and fills `output` with the rows from each rank.
  // sent, received: rows to and from each rank; any or all may be 0.
  std::shared_ptr<Ticket> all_to_all(const at::Tensor& output, const at::Tensor& input,
                                     const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                                     const std::string& label = "", const std::string& wire = "");

  // Returns when the result may be used: on the CPU now, on an accelerator by the current stream. Waiting
  // twice is an error. A failed collective throws with its name, label and size.
  void wait(const std::shared_ptr<Ticket>& ticket);

  // Keep every finished ticket's record (for timelines) besides the totals.
  void set_recording(bool on) { recording_ = on; }
  // Off: collectives waited for from now on appear in no total or record (trials of a calibration).
  void set_counting(bool on);
  std::vector<TicketRecord> take_records();
  std::map<std::string, LabelTotals> totals();
  void reset_totals();
  // By label; not reset.
  std::map<std::string, SumErrors> errors() const;
  // Layers whose sums were too wrong and are sent in bf16 (quantized_backend.h), with the last error.
  std::map<std::string, double> exempted() const;
  // What the calling thread, or on an accelerator its stream, is waiting for, or "" (for a dying run, and for the
  // thread that answers the launcher while the main thread waits for the device).
  std::string waiting_for() const;

  // After a rank of the run failed (oases/core/execution/failure.py): every call of a scheduler of this process, and
  // every wait for a collective on the host, throws the failure, as an OutOfMemoryError if it is one and a
  // DistBackendError otherwise, until `go_on`. The first call counts. Any thread.
  static void halt(const std::string& failure, bool out_of_memory = false);
  static void go_on();
  // For a new group that reuses the name of a destroyed one.
  void renew();

 private:
  OverlapScheduler(std::string name, int rank, int size);
  // The group, or its wire's, for a collective of tensors of a device with this label.
  c10::intrusive_ptr<c10d::ProcessGroup> group(const std::string& wire = "", const std::string& label = "",
                                               c10::DeviceType device = c10::DeviceType::CPU) const;
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(Ticket&)>;
  struct Splits {
    std::vector<int64_t> sent, received;
  };
  // even_empty: an all-to-all, in which ranks with nothing to send or receive take part, too.
  std::shared_ptr<Ticket> issue(const std::string& collective, const std::string& wire,
                                const at::Tensor& counted, std::vector<at::Tensor> tensors,
                                const std::string& label, const Start& start, bool even_empty = false);
  c10::intrusive_ptr<c10d::Work> start_reduce_scatter(Ticket& ticket, at::Tensor output, at::Tensor input,
                                                      const std::string& wire, const std::string& label);
  c10::intrusive_ptr<c10d::Work> start_all_to_all(at::Tensor output, at::Tensor input, Splits numbers,
                                                  const std::string& wire, const std::string& label);
  void note_error(const Judgement& work, const std::string& label);
  void wait_on_host(c10d::Work& work);
  // Throws the failure. at: what this rank was about.
  [[noreturn]] void stop(const std::string& at);
  std::string described(const TicketRecord& record) const;
  void record_end(Ticket& ticket);
  // Adds waited accelerator tickets to the totals: the first, whose events have passed; all, after waiting. Call with
  // mutex_ held, which settle() gives up while it waits.
  void settle_first();
  void settle(std::unique_lock<std::mutex>& lock);
  // issued, finished, link_free_from: on the device's clock.
  void account(const TicketRecord& record, double issued, double finished, double& link_free_from);

  // A shared scheduler refers to its group by name: holding the group, even weakly, would keep its threads
  // from ending with destroy_process_group.
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  std::map<std::string, std::string> wires_;  // names of groups
  std::string code_;                          // of a group that is a wire itself
  std::map<std::string, SumErrors> errors_;
  std::map<std::string, double> exempted_;
  int rank_, size_;
  const pid_t process_ = getpid();
  bool recording_ = false;
  bool counting_ = true;
  std::vector<TicketRecord> records_;
  double link_free_from_ = 0;  // end of the last collective in the totals, on the host's clock
  // The same on an accelerator's, which starts at the first collective; the last issue in the totals, and its time.
  double device_link_free_from_ = 0, device_seconds_ = 0;
  std::optional<c10::Event> last_issue_;
  std::map<std::string, LabelTotals> totals_;
  std::deque<std::shared_ptr<Ticket>> unsettled_;
  mutable std::mutex mutex_;  // guards the above except group_: other threads may read totals
  std::string waiting_for_;

  std::deque<std::shared_ptr<Ticket>> in_flight_;  // not yet waited for
  std::optional<c10::Stream> aside_;               // for the events of ends
};

}  // namespace oases
