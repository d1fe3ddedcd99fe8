#include "nodes_backend.h"

#include <algorithm>
#include <optional>

#include "reduce_ranks.h"
#include "staged_tensors.h"

namespace oases {
namespace {

using Sources = std::vector<const std::byte*>;

// Bytes of a piece of an all-reduce; two pieces are between machines at a time.
constexpr int64_t kPieceBytes = 4 << 20;
// Tags of messages between machines: by the number of the call, and of the exchange in it, both in turn. Of machines
// that are at different calls, one cannot take the other's messages.
constexpr uint64_t kCalls = 1 << 14, kExchanges = 1 << 16;

void check_on_host(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "staged over several machines has no ", name,
                    " of tensors of a device, got one on ", tensor.device(),
                    "; give them to another backend, e.g. \"cuda:nccl\"");
}

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view(-1).view(at::kByte); }

template <typename Options, typename... Reduce>
Options waited_for(std::chrono::milliseconds timeout, const Reduce&... reduce) {
  Options options;
  options.timeout = timeout;
  options.asyncOp = false;
  if constexpr (sizeof...(Reduce) > 0) options.reduceOp = (reduce, ...);
  return options;
}

}  // namespace

NodesBackend::NodesBackend(c10::intrusive_ptr<c10d::Backend> whole, c10::intrusive_ptr<StagedBackend> local,
                           c10::intrusive_ptr<c10d::Backend> across, std::vector<std::vector<int64_t>> ranks)
    : Backend(whole->getRank(), whole->getSize()),
      whole_(std::move(whole)),
      across_(std::move(across)),
      local_(std::move(local)),
      ranks_(std::move(ranks)) {}

void NodesBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  whole_->setTimeout(timeout), across_->setTimeout(timeout), local_->setTimeout(timeout);
}

void NodesBackend::abort() {
  local_->abort();
  const std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  if (waited_for_) waited_for_->abort();
}

void NodesBackend::note_wait(Work message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(waited_for_, message);  // so the one before is freed without the lock
  TORCH_CHECK_WITH(DistBackendError, !aborted_, "staged: rank ", getRank(), " aborted the group");
}

c10d::Backend& NodesBackend::whole(const char* name, const Tensors& used) {
  ++started_;
  for (const auto& tensor : used) check_on_host(name, tensor);
  return *whole_;
}

NodesBackend::Peer NodesBackend::peer(int rank) const {
  const auto& here = ranks_[across_->getRank()];
  const auto found = std::find(here.begin(), here.end(), rank);
  if (found == here.end()) return {whole_.get(), rank};
  return {local_.get(), static_cast<int>(found - here.begin())};
}

NodesBackend::Tensors NodesBackend::of_ranks(const at::Tensor& rows, int node) const {
  Tensors found;
  for (const int64_t rank : ranks_[node]) found.push_back(rows[rank]);
  return found;
}

NodesBackend::Work NodesBackend::enqueue(c10d::OpType type, const char* name, Tensors outputs,
                                         std::chrono::milliseconds timeout, std::function<void()> check,
                                         std::function<void()> run) {
  ++started_;
  const uint64_t call = ++enqueued_;
  const auto checked = [this, name, timeout, check = std::move(check)] {
    try {
      check();
    } catch (const std::exception& error) {
      local_->refuse(name, reason_of(error), timeout)->wait();  // raises it
    }
  };
  return worker_.enqueue(getRank(), type, std::move(outputs), [=, this, run = std::move(run)](LocalWork&) {
    call_ = call, exchanges_ = 0;
    try {
      checked();
      run();
    } catch (const std::exception& error) {
      // A ValueError before any exchange is that of the machine's ranks alike, perhaps of all machines'. After any
      // other error they wait for this rank in the next step, or it has left a message half sent.
      if (exchanges_ > 0 || dynamic_cast<const c10::ValueError*>(&error) == nullptr) local_->abort();
      throw;
    }
  });
}

// What goes to and comes from the ranks of this place on other machines. gloo's own collectives of two ranks keep a
// link less busy than messages both ways. Every call makes a step within the machine first, where ranks compare it.
struct NodesBackend::Exchange {
  // Of each machine; this one's stay.
  Exchange(NodesBackend& of, const Tensors& to, const Tensors& from) : of(&of) {
    const int here = of.across_->getRank();
    const int tag = static_cast<int>(of.call_ % kCalls * kExchanges + of.exchanges_++ % kExchanges);
    of.note_wait(nullptr);
    for (const bool sends : {false, true})
      for (int node = 0; node < of.across_->getSize(); ++node) {
        if (node == here) continue;
        Tensors list{as_bytes((sends ? to : from)[node])};
        works.push_back(sends ? of.across_->send(list, node, tag) : of.across_->recv(list, node, tag));
      }
  }
  // timeout: kUnsetTimeout for the group's.
  void wait(std::chrono::milliseconds timeout) {
    if (timeout == c10d::kUnsetTimeout) timeout = of->timeout_;
    for (const auto& work : works) {
      of->note_wait(work);
      work->wait(timeout);
      of->note_wait(nullptr);
    }
  }
  NodesBackend* of;
  std::vector<Work> works;
};

// A piece of an all-reduce: the ranks' numbers, this rank's part of its machine's sum, and what other machines send.
struct NodesBackend::Piece {
  at::Tensor whole, own, parts, mine;
  std::optional<Exchange> exchange;
};

// The sum over machines of `own`, this machine's, and of what others sent; it may replace `own`.
void NodesBackend::add_parts(const at::Tensor& own, const at::Tensor& parts, const at::Tensor& sum,
                             const c10d::ReduceOp& reduce) const {
  auto sources = staged::parts_of<Sources>(parts, across_->getSize());
  sources[across_->getRank()] = staged::data_of(own);
  reduce_ranks(sum.scalar_type(), reduce, sources.data(), across_->getSize(), sum.numel(),
               staged::data_of(sum), nullptr);
}

// Each rank of a machine gets a part of the machine's sum, adds those of other machines, and gives the result to all
// here. Of more than two machines each adds a part of a part, and they exchange these: fewer bytes, in two steps. While
// pieces are on the way, the next are summed and the ones before given back.
void NodesBackend::sum(const at::Tensor& tensor, const c10d::ReduceOp& reduce,
                       std::chrono::milliseconds timeout) {
  const int64_t n = tensor.numel(), size = getSize(), machines = across_->getSize();
  const int64_t here = across_->getRank(), cut = machines > 2 ? machines : 1;
  const int64_t padded = (n + size - 1) / size * size;
  at::Tensor flat = tensor.is_contiguous() ? tensor.view(-1) : tensor.contiguous().view(-1);
  if (padded != n) flat = at::constant_pad_nd(flat, {0, padded - n});
  const int64_t most = std::max<int64_t>(1, kPieceBytes / flat.element_size() / size) * size;
  const int64_t pieces = std::max<int64_t>(1, (padded + most - 1) / most);  // one of no numbers, to compare
  const auto scattered = waited_for<c10d::ReduceScatterOptions>(timeout, reduce);
  const auto gathered = waited_for<c10d::AllgatherOptions>(timeout);
  std::vector<Piece> all(pieces);
  for (int64_t step = 0; step < pieces + 2; ++step) {
    if (step < pieces) {
      Piece& piece = all[step];
      piece.whole = flat.narrow(0, step * most, std::min(most, padded - step * most));
      piece.own = at::empty({cut, piece.whole.numel() / local_->getSize() / cut}, flat.options());
      piece.parts = at::empty({machines, piece.own.size(1)}, flat.options());
      piece.mine = at::empty({piece.own.size(1)}, flat.options());
      local_->_reduce_scatter_base(piece.own, piece.whole, scattered)->wait();
      piece.exchange.emplace(*this, piece.own.expand_as(piece.parts).unbind(), piece.parts.unbind());
    }
    if (step >= 1 && step <= pieces) {
      Piece& piece = all[step - 1];
      piece.exchange->wait(timeout);
      add_parts(piece.own[cut > 1 ? here : 0], piece.parts, piece.mine, reduce);
      piece.exchange.reset();
      if (cut > 1)
        piece.exchange.emplace(*this, piece.mine.expand_as(piece.own).unbind(), piece.own.unbind());
    }
    if (step >= 2) {
      Piece& piece = all[step - 2];
      if (piece.exchange) piece.exchange->wait(timeout);
      if (piece.exchange) piece.own[here].copy_(piece.mine);
      local_->_allgather_base(piece.whole, piece.exchange ? piece.own : piece.mine, gathered)->wait();
      piece = {};
    }
  }
  if (!flat.is_alias_of(tensor)) at::Tensor(tensor).copy_(flat.narrow(0, 0, n).view(tensor.sizes()));
}

NodesBackend::Work NodesBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce_coalesced(tensors, {options});
}

NodesBackend::Work NodesBackend::allreduce_coalesced(Tensors& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) {
  const auto reduce = options.reduceOp;
  const auto timeout = options.timeout;
  return enqueue(
      c10d::OpType::ALLREDUCE, "all_reduce", tensors, timeout,
      [tensors, reduce] {
        for (const auto& tensor : tensors) {
          check_on_host("all_reduce", tensor), staged::check_layout("all_reduce", tensor);
          check_reduction("all_reduce", tensor.scalar_type(), reduce);
        }
      },
      [this, tensors, reduce, timeout] {
        for (const auto& tensor : tensors) sum(tensor, reduce, timeout);
      });
}

// A step of the machine's ranks alone, so that a difference is an error of all before any has sent to other machines.
void NodesBackend::compare(Description own, std::chrono::milliseconds timeout) {
  constexpr int64_t kBytes = sizeof own;
  at::Tensor one = at::from_blob(&own, {kBytes}, at::kByte).clone();
  at::Tensor all = at::empty({local_->getSize(), kBytes}, at::kByte);
  local_->_allgather_base(all, one, waited_for<c10d::AllgatherOptions>(timeout))->wait();
  const auto* const calls = reinterpret_cast<const Description*>(all.const_data_ptr());
  const auto& here = ranks_[across_->getRank()];
  for (size_t rank = 1; rank < here.size(); ++rank)
    TORCH_CHECK_VALUE(alike(calls[rank], calls[0]), difference(calls[0], static_cast<int>(here[0]),
                                                               calls[rank], static_cast<int>(here[rank])));
}

NodesBackend::Work NodesBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) {
  const auto check = [this, output, input] {
    check_on_host("all_gather", output), check_on_host("all_gather", input);
    staged::check_parts("all_gather", output, input, getSize());
  };
  const auto run = [this, output, input, timeout = options.timeout] {
    const int here = across_->getRank();
    const at::Tensor own = as_bytes(input), rows = as_bytes(output).view({getSize(), own.numel()});
    Tensors of_place;
    for (const auto& machine : ranks_) of_place.push_back(rows[machine[local_->getRank()]]);
    const auto give = [&](int node) {  // what this machine's ranks have of another's ranks, to one another
      std::vector<Tensors> targets{of_ranks(rows, node)};
      Tensors source{of_place[node]};
      local_->allgather(targets, source, waited_for<c10d::AllgatherOptions>(timeout))->wait();
    };
    compare({kAllGather, static_cast<int32_t>(input.scalar_type()), -1, -1, own.numel()}, timeout);
    of_place[here].copy_(own);
    Exchange exchange(*this, Tensors(of_place.size(), own), of_place);
    give(here);
    exchange.wait(timeout);
    for (int node = 0; node < across_->getSize(); ++node)
      if (node != here) give(node);
  };
  return enqueue(c10d::OpType::_ALLGATHER_BASE, "all_gather", {output}, options.timeout, check, run);
}

NodesBackend::Work NodesBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  const auto check = [this, output, input, reduce = options.reduceOp] {
    check_on_host("reduce_scatter", output), check_on_host("reduce_scatter", input);
    staged::check_parts("reduce_scatter", input, output, getSize());
    check_reduction("reduce_scatter", input.scalar_type(), reduce);
  };
  const auto run = [this, output, input, reduce = options.reduceOp, timeout = options.timeout] {
    const int64_t machines = across_->getSize(), n = output.numel();
    const at::Tensor rows = input.view({getSize(), n}), own = at::empty({machines, n}, input.options());
    const at::Tensor parts = at::empty_like(own);
    for (int node = 0; node < machines; ++node) {
      std::vector<Tensors> sources{of_ranks(rows, node)};
      Tensors target{own[node]};
      local_->reduce_scatter(target, sources, waited_for<c10d::ReduceScatterOptions>(timeout, reduce))
          ->wait();
    }
    Exchange(*this, own.unbind(), parts.unbind()).wait(timeout);
    add_parts(own[across_->getRank()], parts, output, reduce);
  };
  return enqueue(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {output}, options.timeout, check, run);
}

NodesBackend::Work NodesBackend::barrier(const c10d::BarrierOptions& options) {
  // Here, where gloo numbers its calls; it ends once this rank's earlier calls of gloo have, too.
  const Work entered = whole_->barrier(options);
  const auto run = [this, options, entered] {
    local_->barrier(options)->wait();
    const auto bytes = [this] { return at::zeros({across_->getSize(), 1}, at::kByte).unbind(); };
    Exchange(*this, bytes(), bytes()).wait(options.timeout);
    entered->wait();  // all ranks have entered it by now
    local_->barrier(options)->wait();
  };
  return enqueue(c10d::OpType::BARRIER, "barrier", {}, options.timeout, [] {}, run);
}

NodesBackend::Work NodesBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return whole("broadcast", tensors).broadcast(tensors, options);
}

NodesBackend::Work NodesBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return whole("reduce", tensors).reduce(tensors, options);
}

NodesBackend::Work NodesBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  return whole("all_gather", staged::joined(staged::first_of(outputs), inputs))
      .allgather(outputs, inputs, options);
}

NodesBackend::Work NodesBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& options) {
  return whole("gather", staged::joined(staged::first_of(outputs), inputs)).gather(outputs, inputs, options);
}

NodesBackend::Work NodesBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& options) {
  return whole("scatter", staged::joined(staged::first_of(inputs), outputs))
      .scatter(outputs, inputs, options);
}

NodesBackend::Work NodesBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  return whole("reduce_scatter", staged::joined(staged::first_of(inputs), outputs))
      .reduce_scatter(outputs, inputs, options);
}

NodesBackend::Work NodesBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  return whole("all_to_all", {output, input})
      .alltoall_base(output, input, output_splits, input_splits, options);
}

NodesBackend::Work NodesBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& options) {
  return whole("all_to_all", staged::joined(outputs, inputs)).alltoall(outputs, inputs, options);
}

NodesBackend::Work NodesBackend::send(Tensors& tensors, int to, int tag) {
  for (const auto& tensor : tensors) check_on_host("send", tensor);
  const Peer other = peer(to);
  return other.by->send(tensors, other.rank, tag);
}

NodesBackend::Work NodesBackend::recv(Tensors& tensors, int from, int tag) {
  for (const auto& tensor : tensors) check_on_host("recv", tensor);
  const Peer other = peer(from);
  return other.by->recv(tensors, other.rank, tag);
}

NodesBackend::Work NodesBackend::recvAnysource(Tensors&, int) {
  TORCH_CHECK_VALUE(false, "staged over several machines does not receive from any rank; name the rank");
}

}  // namespace oases
