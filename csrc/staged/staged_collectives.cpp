#include "staged_collectives.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace oases {
namespace {

// Up to here every rank reduces all, after one meeting; above each reduces its part, after which they meet again.
constexpr int64_t kOneMeeting = 64 << 10;
constexpr int64_t kLine = 64;

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

int64_t pieces_of(int64_t bytes, int64_t piece) { return std::max<int64_t>(1, (bytes + piece - 1) / piece); }

}  // namespace

// A collective under way: its first meeting compares the ranks' descriptions.
class StagedCollectives::Call {
 public:
  Call(StagedCollectives& of, const Patience& patience, const Description& own,
       const std::vector<int64_t>& sent = {}, const std::vector<int64_t>& received = {})
      : ranks(*of.ranks_), patience_(patience), turn_(of.turn_++) {
    Description& description = *ranks.description(ranks.rank(), turn_);
    description = own;
    description.left = std::exchange(of.left_, 0);
    int64_t* const counts = ranks.counts(ranks.rank(), turn_);
    std::copy(sent.begin(), sent.end(), counts);
    std::copy(received.begin(), received.end(), counts + ranks.size());
  }

  void meet() {
    ranks.meet(patience_);
    if (!compared_) compare();
    compared_ = true;
  }

  // write(piece) fills this rank's slot, and read(piece) takes what all wrote, a step later.
  template <typename Write, typename Read>
  void in_pieces(int64_t pieces, const Write& write, const Read& read) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (piece > 0) read(piece - 1);
      write(piece);
      meet();
    }
    read(pieces - 1);
  }

  int64_t sent(int from, int to) const { return ranks.counts(from, turn_)[to]; }
  int64_t received(int at, int from) const { return ranks.counts(at, turn_)[ranks.size() + from]; }

  std::byte* slot() const { return ranks.slot(ranks.rank(), ranks.step()); }
  const std::byte* written_by(int rank) const { return ranks.slot(rank, ranks.step() - 1); }

  SharedRanks& ranks;

 private:
  void compare() const {
    for (int rank = 0; rank < ranks.size(); ++rank)
      TORCH_CHECK_VALUE(ranks.description(rank, turn_)->collective != kRefused, "rank ", ranks.name(rank),
                        " was refused its call: ", reinterpret_cast<const char*>(written_by(rank)));
    const Description& first = *ranks.description(0, turn_);
    for (int rank = 1; rank < ranks.size(); ++rank)
      TORCH_CHECK_VALUE(alike(*ranks.description(rank, turn_), first),
                        difference(first, static_cast<int>(ranks.name(0)), *ranks.description(rank, turn_),
                                   static_cast<int>(ranks.name(rank))));
    if (first.collective != kAllToAll) return;
    for (int from = 0; from < ranks.size(); ++from)
      for (int to = 0; to < ranks.size(); ++to)
        TORCH_CHECK_VALUE(sent(from, to) == received(to, from), "all_to_all: rank ", ranks.name(from),
                          " sends ", sent(from, to), " bytes to rank ", ranks.name(to), ", which receives ",
                          received(to, from), "; give both the same splits");
  }

  const Patience& patience_;
  const uint32_t turn_;
  bool compared_ = false;
};

void StagedCollectives::all_reduce(std::byte* data, int64_t count, at::ScalarType type, ReduceType reduce,
                                   int root, const Patience& patience) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(type)), bytes = count * width;
  Call call(*this, patience,
            {root < 0 ? kAllReduce : kReduce, static_cast<int32_t>(type), reduce, root, bytes});
  SharedRanks& ranks = *ranks_;
  const int rank = ranks.rank(), size = ranks.size();
  const bool gets = root < 0 || root == rank;
  Sources sources(size);
  if (bytes <= kOneMeeting) {
    copy_bytes(call.slot(), data, bytes);
    call.meet();
    if (!gets) return;
    for (int other = 0; other < size; ++other) sources[other] = other == rank ? data : call.written_by(other);
    return reduce_ranks(type, reduce, sources.data(), size, count, data, nullptr);
  }
  // A rank's part of a piece of `m` bytes.
  const auto part_of = [&](int of, int64_t m) {
    const int64_t part = (m + size * kLine - 1) / (size * kLine) * kLine;
    return std::pair{std::min(m, of * part), std::min(m, (of + 1) * part)};
  };
  const int64_t piece = ranks.slot_bytes(), pieces = pieces_of(bytes, piece);
  const auto length = [&](int64_t of) { return std::min(piece, bytes - of * piece); };
  for (int64_t step = 0; step < pieces + 2; ++step) {
    if (step >= 2 && gets) {
      const int64_t m = length(step - 2);
      const std::byte* const from = ranks.result(ranks.step() - 1);
      const auto [begin, end] = part_of(rank, m);
      std::byte* const to = data + (step - 2) * piece;
      copy_bytes(to, from, begin), copy_bytes(to + end, from + end, m - end);
    }
    if (step >= 1 && step <= pieces) {
      const auto [begin, end] = part_of(rank, length(step - 1));
      std::byte* const own = data + (step - 1) * piece + begin;
      for (int other = 0; other < size; ++other)
        sources[other] = other == rank ? own : call.written_by(other) + begin;
      reduce_ranks(type, reduce, sources.data(), size, (end - begin) / width,
                   ranks.result(ranks.step()) + begin, gets ? own : nullptr);
    }
    if (step < pieces) {
      const int64_t m = length(step);
      const auto [begin, end] = part_of(rank, m);
      const std::byte* const from = data + step * piece;
      copy_bytes(call.slot(), from, begin), copy_bytes(call.slot() + end, from + end, m - end);
    }
    if (step <= pieces) call.meet();
  }
}

void StagedCollectives::reduce_scatter(const Sources& sources, std::byte* target, int64_t count,
                                       at::ScalarType type, ReduceType reduce, const Patience& patience) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(type)), bytes = count * width;
  Call call(*this, patience, {kReduceScatter, static_cast<int32_t>(type), reduce, -1, bytes});
  const int rank = ranks_->rank(), size = ranks_->size();
  const int64_t piece = ranks_->slot_bytes() / size / kLine * kLine;
  const auto length = [&](int64_t of) { return std::min(piece, bytes - of * piece); };
  call.in_pieces(
      pieces_of(bytes, piece),
      [&](int64_t step) {
        for (int to = 0; to < size; ++to)
          if (to != rank) copy_bytes(call.slot() + to * piece, sources[to] + step * piece, length(step));
      },
      [&](int64_t step) {
        Sources parts(size);
        for (int from = 0; from < size; ++from)
          parts[from] = from == rank ? sources[rank] + step * piece : call.written_by(from) + rank * piece;
        reduce_ranks(type, reduce, parts.data(), size, length(step) / width, target + step * piece, nullptr);
      });
}

void StagedCollectives::all_gather(const std::byte* source, const Targets& targets, int64_t bytes,
                                   at::ScalarType type, int root, const Patience& patience) {
  Call call(*this, patience, {root < 0 ? kAllGather : kGather, static_cast<int32_t>(type), -1, root, bytes});
  const int rank = ranks_->rank();
  const bool gets = root < 0 || root == rank;
  const int64_t piece = ranks_->slot_bytes();
  const auto length = [&](int64_t of) { return std::min(piece, bytes - of * piece); };
  call.in_pieces(
      pieces_of(bytes, piece),
      [&](int64_t step) {
        if (root != rank) copy_bytes(call.slot(), source + step * piece, length(step));
      },
      [&](int64_t step) {
        if (!gets) return;
        for (int from = 0; from < ranks_->size(); ++from)
          copy_bytes(targets[from] + step * piece,
                     from == rank ? source + step * piece : call.written_by(from), length(step));
      });
}

void StagedCollectives::all_to_all(const Sources& sources, const std::vector<int64_t>& sent,
                                   const Targets& targets, const std::vector<int64_t>& received,
                                   at::ScalarType type, const Patience& patience) {
  Call call(*this, patience, {kAllToAll, static_cast<int32_t>(type), -1, -1, 0}, sent, received);
  const int rank = ranks_->rank(), size = ranks_->size();
  const int64_t piece = ranks_->slot_bytes() / size / kLine * kLine;
  const auto length = [&](int64_t bytes, int64_t of) {
    return std::clamp<int64_t>(bytes - of * piece, 0, piece);
  };
  const auto write = [&](int64_t step) {
    for (int to = 0; to < size; ++to)
      if (to != rank)
        copy_bytes(call.slot() + to * piece, sources[to] + step * piece, length(sent[to], step));
  };
  write(0);
  call.meet();
  int64_t most = 0;  // known only now
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to)
      if (from != to) most = std::max(most, call.sent(from, to));
  const int64_t pieces = pieces_of(most, piece);
  for (int64_t step = 0; step < pieces; ++step) {
    for (int from = 0; from < size; ++from)
      if (from != rank)
        copy_bytes(targets[from] + step * piece, call.written_by(from) + rank * piece,
                   length(received[from], step));
    if (step + 1 == pieces) break;
    write(step + 1);
    call.meet();
  }
  copy_bytes(targets[rank], sources[rank], sent[rank]);
}

void StagedCollectives::scatter(const Sources& sources, std::byte* target, int64_t bytes, at::ScalarType type,
                                int root, const Patience& patience) {
  Call call(*this, patience, {kScatter, static_cast<int32_t>(type), -1, root, bytes});
  const int rank = ranks_->rank(), size = ranks_->size();
  const int64_t piece = ranks_->slot_bytes() / size / kLine * kLine;
  const auto length = [&](int64_t of) { return std::min(piece, bytes - of * piece); };
  call.in_pieces(
      pieces_of(bytes, piece),
      [&](int64_t step) {
        if (rank != root) return;
        for (int to = 0; to < size; ++to)
          if (to != rank) copy_bytes(call.slot() + to * piece, sources[to] + step * piece, length(step));
      },
      [&](int64_t step) {
        if (rank != root)
          copy_bytes(target + step * piece, call.written_by(root) + rank * piece, length(step));
      });
  if (rank == root) copy_bytes(target, sources[rank], bytes);
}

void StagedCollectives::broadcast(std::byte* data, int64_t bytes, at::ScalarType type, int root,
                                  const Patience& patience) {
  Call call(*this, patience, {kBroadcast, static_cast<int32_t>(type), -1, root, bytes});
  const int64_t piece = ranks_->slot_bytes();
  const bool sends = ranks_->rank() == root;
  const auto length = [&](int64_t of) { return std::min(piece, bytes - of * piece); };
  call.in_pieces(
      pieces_of(bytes, piece),
      [&](int64_t step) {
        if (sends) copy_bytes(call.slot(), data + step * piece, length(step));
      },
      [&](int64_t step) {
        if (!sends) copy_bytes(data + step * piece, call.written_by(root), length(step));
      });
}

void StagedCollectives::barrier(const Patience& patience) {
  Call(*this, patience, {kBarrier, 0, -1, -1, 0}).meet();
}

void StagedCollectives::refuse(const std::string& reason, const Patience& patience) {
  Call call(*this, patience, {kRefused, 0, -1, -1, 0});
  std::snprintf(reinterpret_cast<char*>(call.slot()), ranks_->slot_bytes(), "%s", reason.c_str());
  call.meet();
}

}  // namespace oases
