#include "nodes_collectives.h"

#include <algorithm>
#include <optional>

#include "reduce_ranks.h"
#include "staged_tensors.h"

namespace oases {
namespace {

using namespace staged;
using Sources = std::vector<const std::byte*>;

// Bytes of a piece of an all-reduce; two pieces are between machines at a time.
constexpr int64_t kPieceBytes = 4 << 20;
// Tags of messages between machines: by the number of the call, and of the exchange in it, both in turn. Of machines
// that are at different calls, one cannot take the other's messages.
constexpr uint64_t kCalls = 1 << 14, kExchanges = 1 << 16;
static_assert(kCalls * kExchanges <= NodesCollectives::kTags);

// Of a dense tensor, in the order of its memory, which it does not keep.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, at::kByte);
}

NodesCollectives::Tensors as_bytes(const NodesCollectives::Tensors& tensors) {
  NodesCollectives::Tensors all;
  for (const auto& tensor : tensors) all.push_back(as_bytes(tensor));
  return all;
}

template <typename Options>
Options waited_for(std::chrono::milliseconds timeout) {
  Options options;
  options.timeout = timeout;
  options.asyncOp = false;
  return options;
}

c10d::ReduceScatterOptions waited_for(std::chrono::milliseconds timeout, const c10d::ReduceOp& reduce) {
  auto options = waited_for<c10d::ReduceScatterOptions>(timeout);
  options.reduceOp = reduce;
  return options;
}

}  // namespace

NodesCollectives::NodesCollectives(c10::intrusive_ptr<c10d::Backend> whole,
                                   c10::intrusive_ptr<StagedBackend> local,
                                   std::vector<std::vector<int64_t>> ranks)
    : whole_(std::move(whole)),
      local_(std::move(local)),
      ranks_(std::move(ranks)),
      at_(whole_->getSize()),
      machines_(static_cast<int64_t>(ranks_.size())) {
  for (int64_t machine = 0; machine < machines_; ++machine)
    for (int64_t place = 0; place < local_->getSize(); ++place)
      at_[ranks_[machine][place]] = {machine, place};
  std::tie(here_, place_) = at_[whole_->getRank()];
}

void NodesCollectives::set_timeout(Timeout timeout) {
  whole_->setTimeout(timeout), local_->setTimeout(timeout);
}

void NodesCollectives::refuse(const char* name, const std::string& reason, Timeout timeout) {
  local_->refuse(name, reason, timeout)->wait();
}

void NodesCollectives::abort() {
  local_->abort();
  const std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  if (waited_for_) waited_for_->abort();
}

void NodesCollectives::note_wait(Work message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(waited_for_, message);  // so the one before is freed without the lock
  TORCH_CHECK_WITH(DistBackendError, !aborted_, "staged: rank ", whole_->getRank(), " aborted the group");
}

NodesCollectives::Peer NodesCollectives::peer(int rank) const {
  if (!here(rank)) return {whole_.get(), rank};
  return {local_.get(), static_cast<int>(at_[rank].second)};
}

NodesCollectives::Tensors NodesCollectives::of_ranks(const Tensors& by_rank, int64_t machine) const {
  Tensors found;
  for (const int64_t rank : ranks_[machine]) found.push_back(by_rank[rank]);
  return found;
}

NodesCollectives::Messages NodesCollectives::of_place(const Tensors& by_machine) const {
  Messages found;
  for (int64_t machine = 0; machine < machines_; ++machine)
    if (machine != here_) found.emplace_back(ranks_[machine][place_], as_bytes(by_machine[machine]));
  return found;
}

void NodesCollectives::wait_for(int64_t rank, c10d::Work& message, Timeout timeout) const {
  try {
    message.wait(timeout);
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistBackendError, false, "staged: rank ", whole_->getRank(),
                     " waited for a message to or from rank ", rank,
                     " of another machine: ", reason_of(error));
  }
}

// Messages to and from ranks of other machines, in gloo's send and receive: its own collectives of two ranks keep a link
// less busy than messages both ways. Every call makes a step within the machine first, where ranks compare it.
struct NodesCollectives::Exchange {
  Exchange(NodesCollectives& of, const Messages& to, const Messages& from) : of(&of) {
    const int tag = kTags + static_cast<int>(of.call_ % kCalls * kExchanges + of.exchanges_++ % kExchanges);
    of.note_wait(nullptr);
    for (const auto& [rank, bytes] : from) {
      Tensors list{bytes};
      works.emplace_back(rank, of.whole_->recv(list, static_cast<int>(rank), tag));
    }
    for (const auto& [rank, bytes] : to) {
      Tensors list{bytes};
      works.emplace_back(rank, of.whole_->send(list, static_cast<int>(rank), tag));
    }
  }
  // timeout: kUnsetTimeout for the group's.
  void wait(Timeout timeout) {
    if (timeout == c10d::kUnsetTimeout) timeout = of->local_->timeout();
    for (const auto& [rank, work] : works) {
      of->note_wait(work);
      of->wait_for(rank, *work, timeout);
      of->note_wait(nullptr);
    }
  }
  NodesCollectives* of;
  std::vector<std::pair<int64_t, Work>> works;
};

void NodesCollectives::compare(Description own, Timeout timeout) {
  constexpr int64_t kBytes = sizeof own;
  at::Tensor one = at::from_blob(&own, {kBytes}, at::kByte).clone();
  at::Tensor all = at::empty({local_->getSize(), kBytes}, at::kByte);
  local_->_allgather_base(all, one, waited_for<c10d::AllgatherOptions>(timeout))->wait();
  const auto* const calls = reinterpret_cast<const Description*>(all.const_data_ptr());
  const auto& here = ranks_[here_];
  for (size_t rank = 1; rank < here.size(); ++rank)
    TORCH_CHECK_VALUE(alike(calls[rank], calls[0]), difference(calls[0], static_cast<int>(here[0]),
                                                               calls[rank], static_cast<int>(here[rank])));
}

// A piece of an all-reduce: the ranks' numbers, this rank's part of its machine's sum, and what other machines send.
struct NodesCollectives::Piece {
  at::Tensor whole, own, parts, mine;
  std::optional<Exchange> exchange;
};

// The sum over machines of `own`, this machine's, and of what others sent; it may replace `own`.
void NodesCollectives::add_parts(const at::Tensor& own, const at::Tensor& parts, const at::Tensor& sum,
                                 const c10d::ReduceOp& reduce) const {
  auto sources = parts_of<Sources>(parts, static_cast<int>(machines_));
  sources[here_] = data_of(own);
  reduce_ranks(sum.scalar_type(), reduce, sources.data(), static_cast<int>(machines_), sum.numel(),
               data_of(sum), nullptr);
}

// Each rank of a machine gets a part of the machine's sum, adds those of other machines, and gives the result to all
// here. Of more than two machines each adds a part of a part, and they exchange these: fewer bytes, in two steps. While
// pieces are on the way, the next are summed and the ones before given back.
void NodesCollectives::all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& reduce, Timeout timeout) {
  const int64_t n = tensor.numel(), size = whole_->getSize(), cut = machines_ > 2 ? machines_ : 1;
  const int64_t padded = (n + size - 1) / size * size;
  at::Tensor flat = tensor.is_contiguous() ? tensor.view(-1) : tensor.contiguous().view(-1);
  if (padded != n) flat = at::constant_pad_nd(flat, {0, padded - n});
  const int64_t most = std::max<int64_t>(1, kPieceBytes / flat.element_size() / size) * size;
  const int64_t pieces = std::max<int64_t>(1, (padded + most - 1) / most);  // one of no numbers, to compare
  const auto scattered = waited_for(timeout, reduce);
  const auto gathered = waited_for<c10d::AllgatherOptions>(timeout);
  std::vector<Piece> all(pieces);
  for (int64_t step = 0; step < pieces + 2; ++step) {
    if (step < pieces) {
      Piece& piece = all[step];
      piece.whole = flat.narrow(0, step * most, std::min(most, padded - step * most));
      piece.own = at::empty({cut, piece.whole.numel() / local_->getSize() / cut}, flat.options());
      piece.parts = at::empty({machines_, piece.own.size(1)}, flat.options());
      piece.mine = at::empty({piece.own.size(1)}, flat.options());
      local_->_reduce_scatter_base(piece.own, piece.whole, scattered)->wait();
      piece.exchange.emplace(*this, of_place(piece.own.expand_as(piece.parts).unbind()),
                             of_place(piece.parts.unbind()));
    }
    if (step >= 1 && step <= pieces) {
      Piece& piece = all[step - 1];
      piece.exchange->wait(timeout);
      add_parts(piece.own[cut > 1 ? here_ : 0], piece.parts, piece.mine, reduce);
      piece.exchange.reset();
      if (cut > 1)
        piece.exchange.emplace(*this, of_place(piece.mine.expand_as(piece.own).unbind()),
                               of_place(piece.own.unbind()));
    }
    if (step >= 2) {
      Piece& piece = all[step - 2];
      if (piece.exchange) piece.exchange->wait(timeout);
      if (piece.exchange) piece.own[here_].copy_(piece.mine);
      local_->_allgather_base(piece.whole, piece.exchange ? piece.own : piece.mine, gathered)->wait();
      piece = {};
    }
  }
  if (!flat.is_alias_of(tensor)) at::Tensor(tensor).copy_(flat.narrow(0, 0, n).view(tensor.sizes()));
}

void NodesCollectives::all_gather(const at::Tensor& all, const at::Tensor& own, int root, Timeout timeout) {
  const Tensors rows = as_bytes(all).view({whole_->getSize(), size_of(own)}).unbind();
  Tensors of_machines;
  for (const auto& machine : ranks_) of_machines.push_back(rows[machine[place_]]);
  const auto give = [&](int64_t machine) {  // what ranks here have of another machine's, to one another
    std::vector<Tensors> targets{of_ranks(rows, machine)};
    Tensors source{of_machines[machine]};
    local_->allgather(targets, source, waited_for<c10d::AllgatherOptions>(timeout))->wait();
  };
  compare({root < 0 ? kAllGather : kGather, static_cast<int32_t>(own.scalar_type()), -1, root, size_of(own)},
          timeout);
  of_machines[here_].copy_(as_bytes(own));
  Exchange exchange(*this, of_place(Tensors(machines_, own)), of_place(of_machines));
  give(here_);
  exchange.wait(timeout);
  for (int64_t machine = 0; machine < machines_; ++machine)
    if (machine != here_) give(machine);
}

void NodesCollectives::reduce_scatter(const at::Tensor& rows, const at::Tensor& own,
                                      const c10d::ReduceOp& reduce, Timeout timeout) {
  const Tensors by_rank = rows.view({whole_->getSize(), own.numel()}).unbind();
  const at::Tensor sums = at::empty({machines_, own.numel()}, rows.options()), parts = at::empty_like(sums);
  for (int64_t machine = 0; machine < machines_; ++machine) {
    std::vector<Tensors> sources{of_ranks(by_rank, machine)};
    Tensors target{sums[machine]};
    local_->reduce_scatter(target, sources, waited_for(timeout, reduce))->wait();
  }
  Exchange(*this, of_place(sums.unbind()), of_place(parts.unbind())).wait(timeout);
  add_parts(sums[here_], parts, own, reduce);
}

void NodesCollectives::scatter(const at::Tensor& output, const Tensors& inputs, int root, Timeout timeout) {
  const int64_t bytes = size_of(output);
  compare({kScatter, static_cast<int32_t>(output.scalar_type()), -1, root, bytes}, timeout);
  const auto [machine, place] = at_[root];
  Tensors all(machines_);  // on ranks of the root's place: what goes to each machine's ranks
  if (whole_->getRank() == root) {
    for (int64_t to = 0; to < machines_; ++to) all[to] = at::cat(as_bytes(of_ranks(inputs, to)));
    Exchange(*this, of_place(all), {}).wait(timeout);
  } else if (place_ == place) {
    all[here_] = at::empty({bytes * local_->getSize()}, at::kByte);
    if (machine != here_) Exchange(*this, {}, {{root, all[here_]}}).wait(timeout);
  }
  std::vector<Tensors> parts;
  if (place_ == place) parts.push_back(all[here_].view({local_->getSize(), bytes}).unbind());
  auto options = waited_for<c10d::ScatterOptions>(timeout);
  options.rootRank = place;
  Tensors target{as_bytes(output)};
  local_->scatter(target, parts, options)->wait();
}

void NodesCollectives::broadcast(const at::Tensor& tensor, int root, Timeout timeout) {
  compare({kBroadcast, static_cast<int32_t>(tensor.scalar_type()), -1, root, size_of(tensor)}, timeout);
  const auto [machine, place] = at_[root];
  if (whole_->getRank() == root)
    Exchange(*this, of_place(Tensors(machines_, tensor)), {}).wait(timeout);
  else if (place_ == place && machine != here_)
    Exchange(*this, {}, {{root, as_bytes(tensor)}}).wait(timeout);
  auto options = waited_for<c10d::BroadcastOptions>(timeout);
  options.rootRank = place;
  Tensors list{as_bytes(tensor)};
  local_->broadcast(list, options)->wait();
}

void NodesCollectives::all_to_all(const Tensors& outputs, const Tensors& inputs, Timeout timeout) {
  Messages to, from;
  const auto type = static_cast<int32_t>(inputs.front().scalar_type());
  compare({kAllToAll, type, -1, -1, 0}, timeout);
  for (int rank = 0; rank < whole_->getSize(); ++rank)
    if (!here(rank))
      to.emplace_back(rank, as_bytes(inputs[rank])), from.emplace_back(rank, as_bytes(outputs[rank]));
  Tensors sent = as_bytes(of_ranks(inputs, here_)), received = as_bytes(of_ranks(outputs, here_));
  const auto exchange_here = local_->alltoall(received, sent, waited_for<c10d::AllToAllOptions>(timeout));
  exchange_here->wait();
  Exchange(*this, to, from).wait(timeout);
}

void NodesCollectives::barrier(Timeout timeout) {
  const auto options = waited_for<c10d::BarrierOptions>(timeout);
  local_->barrier(options)->wait();
  const auto bytes = [this] { return at::zeros({machines_, 1}, at::kByte).unbind(); };
  const Tensors to = bytes(), from = bytes();
  Exchange(*this, of_place(to), of_place(from)).wait(timeout);
  local_->barrier(options)->wait();
}

}  // namespace oases
