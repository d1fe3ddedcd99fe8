// The collectives of StagedStreams: what moves, piece by piece.
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "staged_streams.h"

namespace oases {
namespace {

void reduce_into(at::Tensor& total, const at::Tensor& one, const at::Tensor& other, ReduceType reduce) {
  switch (reduce) {
    case ReduceType::SUM:
    case ReduceType::AVG:
      at::add_out(total, one, other);
      break;
    case ReduceType::PRODUCT:
      at::mul_out(total, one, other);
      break;
    case ReduceType::MIN:
      at::minimum_out(total, one, other);
      break;
    case ReduceType::MAX:
      at::maximum_out(total, one, other);
      break;
    case ReduceType::BAND:
      at::bitwise_and_out(total, one, other);
      break;
    case ReduceType::BOR:
      at::bitwise_or_out(total, one, other);
      break;
    case ReduceType::BXOR:
      at::bitwise_xor_out(total, one, other);
      break;
    default:  // check_reduction has refused it
      TORCH_INTERNAL_ASSERT(false);
  }
}

}  // namespace

// parts: of all ranks, on the device; those of others are scratch.
void StagedStreams::sum(uint32_t piece, const Sources& parts, int64_t count, at::ScalarType type,
                        ReduceType reduce, std::byte* to) {
  const c10::StreamGuard on(adding_);
  arrived_[piece % 2].block(adding_);
  sent_[piece % 2].block(adding_);  // the scratch of two pieces before
  if (count > 0) {
    const bool narrow = type == at::kHalf || type == at::kBFloat16;
    const auto part = [&](int rank) { return numbers(parts[rank], count, type, device_); };
    // In the order of ranks, and nothing of the caller's is written before it has been read.
    at::Tensor result = numbers(to, count, type, device_);
    at::Tensor total = narrow ? part(0).to(at::kFloat) : rank_ == 0 ? result : part(0);
    if (size_ == 1) total.copy_(part(0));
    for (int rank = 1; rank < size_; ++rank)
      reduce_into(total, rank == 1 && !narrow ? part(0) : total, part(rank), reduce);
    // By a tensor: by a number CUDA multiplies with its reciprocal, which is rounded.
    if (reduce == ReduceType::AVG) total.div_(at::full({}, size_, total.options()));
    if (!total.is_same(result)) result.copy_(total);
  }
  summed_[piece % 2].record(adding_);
}

void StagedStreams::all_reduce(std::byte* data, int64_t count, at::ScalarType type, ReduceType reduce,
                               int root, const Patience& patience) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(type)), bytes = count * width;
  agree({root < 0 ? kAllReduce : kReduce, static_cast<int32_t>(type), reduce, root, bytes}, patience);
  const bool gets = root < 0 || root == rank_;
  const int64_t piece_bytes = area_.slot_bytes(), pieces = (bytes + piece_bytes - 1) / piece_bytes;
  const uint32_t first = piece_ + 1;
  const auto length = [&](int64_t of) { return std::min(piece_bytes, bytes - of * piece_bytes); };
  const auto part_of = [&](int rank, int64_t m) {
    const int64_t part = part_bytes(m, size_);
    return std::pair{std::min(m, rank * part), std::min(m, (rank + 1) * part)};
  };
  piece_ += static_cast<uint32_t>(pieces);
  sums_ |= pieces > 0;
  // A piece is put, summed and taken back in steps of their own, so that no stream waits for the next step of a piece
  // while it could copy another one.
  for (int64_t step = 0; pieces > 0 && step < pieces + 2; ++step) {
    if (step < pieces)
      put(first + step, [&](std::byte* slot) {
        const auto [begin, end] = part_of(rank_, length(step));
        const std::byte* const from = data + step * piece_bytes;
        copy_out(slot, from, begin), copy_out(slot + end, from + end, length(step) - end);
      });
    if (step >= 1 && step <= pieces) {
      const uint32_t piece = first + step - 1;
      const auto [begin, end] = part_of(rank_, length(step - 1));
      std::byte* const own = data + (step - 1) * piece_bytes + begin;
      Sources parts(size_);
      take(piece, [&, begin = begin, end = end] {
        for (int other = 0; other < size_; ++other) {
          parts[other] = other == rank_ ? own : scratch(piece, other);
          if (other != rank_) copy_in(scratch(piece, other), area_.slot(other, piece) + begin, end - begin);
        }
      });
      std::byte* const to = gets ? own : scratch(piece, rank_);
      sum(piece, parts, (end - begin) / width, type, reduce, to);
      const c10::StreamGuard on(out_);
      summed_[piece % 2].block(out_);
      copy_out(area_.slot(rank_, piece) + begin, to, end - begin);  // others' parts alone were put there
      sent_[piece % 2].record(out_);
      write(out_, &DeviceArea::Words::summed, piece);
    }
    if (step >= 2) {
      const uint32_t piece = first + step - 2;
      const c10::StreamGuard on(in_);
      if (gets) wait_for_others(in_, &DeviceArea::Words::summed, piece);
      for (int other = 0; gets && other < size_; ++other) {
        if (other == rank_) continue;
        const auto [begin, end] = part_of(other, length(step - 2));
        copy_in(data + (step - 2) * piece_bytes + begin, area_.slot(other, piece) + begin, end - begin);
      }
      write(in_, &DeviceArea::Words::done, piece);
    }
  }
}

void StagedStreams::reduce_scatter(const Sources& sources, std::byte* target, int64_t count,
                                   at::ScalarType type, ReduceType reduce, const Patience& patience) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(type)), bytes = count * width;
  agree({kReduceScatter, static_cast<int32_t>(type), reduce, -1, bytes}, patience);
  const int64_t piece_bytes = area_.slot_bytes() / size_ / kUnit * kUnit;
  in_pieces(bytes, piece_bytes, [&](uint32_t piece, int64_t at, int64_t length) {
    put(piece, [&](std::byte* slot) {
      for (int to = 0; to < size_; ++to)
        if (to != rank_) copy_out(slot + to * piece_bytes, sources[to] + at, length);
    });
    Sources parts(size_);
    take(piece, [&] {
      for (int from = 0; from < size_; ++from) {
        parts[from] = from == rank_ ? sources[from] + at : scratch(piece, from);
        if (from != rank_)
          copy_in(scratch(piece, from), area_.slot(from, piece) + rank_ * piece_bytes, length);
      }
    });
    write(in_, &DeviceArea::Words::done, piece);
    sum(piece, parts, length / width, type, reduce, target + at);
  });
}

void StagedStreams::all_gather(const std::byte* source, const Targets& targets, int64_t bytes,
                               at::ScalarType type, int root, const Patience& patience) {
  agree({root < 0 ? kAllGather : kGather, static_cast<int32_t>(type), -1, root, bytes}, patience);
  const bool gets = root < 0 || root == rank_;
  in_pieces(bytes, area_.slot_bytes(), [&](uint32_t piece, int64_t at, int64_t length) {
    put(piece, [&](std::byte* slot) {
      if (root != rank_) copy_out(slot, source + at, length);
    });
    take(piece, [&] {
      for (int from = 0; gets && from < size_; ++from)
        if (from != rank_) copy_in(targets[from] + at, area_.slot(from, piece), length);
    });
    write(in_, &DeviceArea::Words::done, piece);
  });
  const c10::StreamGuard on(adding_);
  if (gets) copy(targets[rank_], device_, source, device_, bytes);
}

void StagedStreams::scatter(const Sources& sources, std::byte* target, int64_t bytes, at::ScalarType type,
                            int root, const Patience& patience) {
  agree({kScatter, static_cast<int32_t>(type), -1, root, bytes}, patience);
  const int64_t piece_bytes = area_.slot_bytes() / size_ / kUnit * kUnit;
  in_pieces(bytes, piece_bytes, [&](uint32_t piece, int64_t at, int64_t length) {
    put(piece, [&](std::byte* slot) {
      for (int to = 0; rank_ == root && to < size_; ++to)
        if (to != rank_) copy_out(slot + to * piece_bytes, sources[to] + at, length);
    });
    take(piece, [&] {
      if (rank_ != root) copy_in(target + at, area_.slot(root, piece) + rank_ * piece_bytes, length);
    });
    write(in_, &DeviceArea::Words::done, piece);
  });
  const c10::StreamGuard on(adding_);
  if (rank_ == root) copy(target, device_, sources[rank_], device_, bytes);
}

void StagedStreams::broadcast(std::byte* data, int64_t bytes, at::ScalarType type, int root,
                              const Patience& patience) {
  agree({kBroadcast, static_cast<int32_t>(type), -1, root, bytes}, patience);
  give(data, bytes, root);
}

void StagedStreams::message(std::byte* data, int64_t bytes, at::ScalarType type, const Patience& patience) {
  agree({kMessage, static_cast<int32_t>(type), -1, -1, bytes}, patience);
  give(data, bytes, 0);
}

void StagedStreams::give(std::byte* data, int64_t bytes, int root) {
  in_pieces(bytes, area_.slot_bytes(), [&](uint32_t piece, int64_t at, int64_t length) {
    put(piece, [&](std::byte* slot) {
      if (rank_ == root) copy_out(slot, data + at, length);
    });
    take(piece, [&] {
      if (rank_ != root) copy_in(data + at, area_.slot(root, piece), length);
    });
    write(in_, &DeviceArea::Words::done, piece);
  });
}

void StagedStreams::agree_on_counts(const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                                    const Patience& patience) {
  const uint32_t number = all_to_alls_++;
  wait_for_hosts([&] { return area_.may_say_counts(number); }, DeviceArea::kAllToAllsAhead, patience);
  area_.say_counts(rank_, number, sent, received);
  const std::string difference = area_.compare_counts(rank_, number);
  if (difference.empty()) return;
  ranks_->break_group(c10::str(patience.operation, ": ", difference));
  ranks_->check_whole();
}

// A rank knows how many pieces go to and come from each other one, and no host waits to learn how many the others have
// among themselves. So each two ranks count and wait for theirs alone, in the slots of the group, which no collective
// before or after uses meanwhile.
void StagedStreams::all_to_all(const Sources& sources, const std::vector<int64_t>& sent,
                               const Targets& targets, const std::vector<int64_t>& received,
                               at::ScalarType type, const Patience& patience) {
  agree({kAllToAll, static_cast<int32_t>(type), -1, -1, 0}, patience);
  agree_on_counts(sent, received, patience);
  const int64_t piece_bytes = area_.slot_bytes() / size_ / kUnit * kUnit;
  const uint32_t before = piece_;
  piece_ += DeviceArea::kSlots;                      // so that what follows is put once all has been taken
  write(out_, &DeviceArea::Words::put, before + 1);  // this rank has come here
  wait_for_others(out_, &DeviceArea::Words::done, before);
  int64_t most = 0;
  for (int other = 0; other < size_; ++other)
    if (other != rank_) most = std::max({most, sent[other], received[other]});
  for (int64_t at = 0; at < most; at += piece_bytes)
    for (const bool gives : {true, false}) {
      const c10::Stream& stream = gives ? out_ : in_;
      const c10::StreamGuard on(stream);
      for (int other = 0; other < size_; ++other) {
        const int64_t length = std::min((gives ? sent : received)[other] - at, piece_bytes);
        if (other == rank_ || length <= 0) continue;
        const uint32_t piece = ++(gives ? pairs_.given : pairs_.taken)[other];
        if (gives) {
          words_.wait(stream, area_.taken(other, rank_), piece - DeviceArea::kSlots);
          copy_out(area_.slot(rank_, piece) + other * piece_bytes, sources[other] + at, length);
          words_.write(stream, area_.given(rank_, other), piece);
        } else {
          words_.wait(stream, area_.given(other, rank_), piece);
          copy_in(targets[other] + at, area_.slot(other, piece) + rank_ * piece_bytes, length);
          words_.write(stream, area_.taken(rank_, other), piece);
        }
      }
    }
  write(in_, &DeviceArea::Words::done, piece_);
  taken_.record(in_), taken_.block(out_);
  write(out_, &DeviceArea::Words::put, piece_);  // others may wait for this rank until then
  const c10::StreamGuard on(adding_);
  copy(targets[rank_], device_, sources[rank_], device_, sent[rank_]);
}

}  // namespace oases
