#include "staged_streams.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace oases {
namespace {

// Where a rank's part of a piece begins and ends.
constexpr int64_t kUnit = 64;

int64_t part_bytes(int64_t bytes, int ranks) { return (bytes + ranks * kUnit - 1) / (ranks * kUnit) * kUnit; }

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

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, -1);  // high priority, like NCCL's
}

int place_of(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<const void*> memory_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> found;
  for (const auto& tensor : tensors) found.push_back(tensor.storage().data());
  return found;
}

std::vector<c10::Event> two_events(c10::DeviceType type) {
  std::vector<c10::Event> events;
  for (int i = 0; i < 2; ++i) events.emplace_back(type);
  return events;
}

}  // namespace

StagedStreams::StagedStreams(std::shared_ptr<SharedRanks> ranks, c10::Device device, DeviceArea area,
                             int streams)
    : ranks_(std::move(ranks)),
      device_(device),
      rank_(place_of(ranks_->rank(), area.ranks())),
      size_(area.size()),
      area_(std::move(area)),
      words_(stream_words_of(device.type())),
      out_(new_stream(device)),
      in_(streams > 1 ? new_stream(device) : out_),
      adding_(streams > 1 ? new_stream(device) : out_),
      arrived_(two_events(device.type())),
      summed_(two_events(device.type())),
      sent_(two_events(device.type())),
      ready_(device.type()),
      put_(device.type()),
      added_(device.type()) {
  const c10::StreamGuard on(in_);
  if (streams > 1) {  // and so sums
    const int64_t bytes = 2 * size_ * part_bytes(area_.slot_bytes(), size_);
    scratch_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    arrived_[0].record(in_), arrived_[0].block(adding_);  // the memory is there
  }
  words_.add_memory(area_.memory(), area_.memory_bytes());
  watch_ = std::make_unique<StreamWatch>(ranks_, area_, device_);
}

StagedStreams::~StagedStreams() {
  watch_.reset();
  const c10::StreamGuard on(in_);
  words_.remove_memory(area_.memory());
}

std::shared_ptr<Watched> StagedStreams::begin(const std::vector<at::Tensor>& used, const Patience& patience) {
  auto watched = std::make_shared<Watched>(ranks_, device_.type(), patience);
  ready_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  for (const auto& stream : {out_, in_, adding_}) ready_.block(stream);
  while (!pending_.empty() && pending_.front().watched.expired()) pending_.pop_front();
  // A tensor of an earlier collective that nobody has waited for: in one stream, as NCCL has, they would be in order.
  const std::vector<const void*> memory = memory_of(used);
  for (const auto& earlier : pending_) {
    const auto same =
        std::find_first_of(memory.begin(), memory.end(), earlier.memory.begin(), earlier.memory.end());
    const auto running = same == memory.end() ? nullptr : earlier.watched.lock();
    if (running)
      for (const auto& stream : {out_, in_, adding_}) running->done->block(stream);
  }
  sums_ = false;
  return watched;
}

c10::intrusive_ptr<c10d::Work> StagedStreams::end(c10d::OpType type, std::vector<at::Tensor> outputs,
                                                  const std::vector<at::Tensor>& used,
                                                  std::shared_ptr<Watched> watched) {
  put_.record(out_), put_.block(in_);
  added_.record(adding_), added_.block(in_);
  watched->done->record(in_);
  // in_ goes on once all three have done their part.
  for (at::Tensor tensor : used) tensor.record_stream(in_);
  watched->last_piece = piece_;
  watched->sums = sums_;
  watch_->add(watched);
  pending_.push_back({memory_of(used), watched});
  return c10::make_intrusive<StagedWork>(ranks_->rank(), type, std::move(outputs), in_, std::move(watched));
}

void StagedStreams::give_up(const std::exception& error, uint32_t turn, const Patience& patience) {
  const auto* const known = dynamic_cast<const c10::Error*>(&error);
  const std::string reason = known ? known->what_without_backtrace() : error.what();
  left_ = 0;
  if (turn_ == turn)
    agree({kRefused, 0, -1, -1, 0}, patience, reason);
  else
    ranks_->break_group(c10::str(patience.operation, ": rank ", ranks_->rank(), " failed: ", reason));
}

// The collective at hand is the next one of all ranks.
void StagedStreams::agree(Description description, const Patience& patience, const std::string& reason) {
  const uint32_t turn = turn_;
  while (!area_.may_say(turn)) {
    ranks_->check_whole();
    if (patience.over())
      ranks_->break_group(c10::str(patience.operation, ": rank ", ranks_->rank(), " timed out after ",
                                   patience.timeout.count(), " ms, because a rank's host is ",
                                   DeviceArea::kAhead, " collectives behind"));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  description.left = std::exchange(left_, 0);
  area_.say(rank_, turn, description, reason);
  ++turn_;
  const std::string difference = area_.compare(rank_, turn);
  if (difference.empty()) return;
  ranks_->break_group(c10::str(patience.operation, ": ", difference));
  ranks_->check_whole();
}

at::Tensor StagedStreams::numbers(const std::byte* data, int64_t count, at::ScalarType type,
                                  c10::Device device) const {
  return at::for_blob(const_cast<std::byte*>(data), {count})
      .options(at::TensorOptions(type).device(device))
      .target_device(device)
      .make_tensor();
}

void StagedStreams::copy(std::byte* to, c10::Device to_device, const std::byte* from, c10::Device from_device,
                         int64_t bytes) const {
  if (bytes > 0 && to != from)
    numbers(to, bytes, at::kByte, to_device)
        .copy_(numbers(from, bytes, at::kByte, from_device), /*non_blocking=*/true);
}

void StagedStreams::copy_out(std::byte* slot, const std::byte* from, int64_t bytes) const {
  copy(slot, at::kCPU, from, device_, bytes);
}

void StagedStreams::copy_in(std::byte* to, const std::byte* slot, int64_t bytes) const {
  copy(to, device_, slot, at::kCPU, bytes);
}

void StagedStreams::wait_for_others(const c10::Stream& stream, Word word, uint32_t piece) {
  for (int other = 0; other < size_; ++other)
    if (other != rank_) words_.wait(stream, &(area_.words(other).*word), piece);
}

void StagedStreams::write(const c10::Stream& stream, Word word, uint32_t piece) {
  words_.write(stream, &(area_.words(rank_).*word), piece);
}

std::byte* StagedStreams::scratch(uint32_t piece, int rank) const {
  const int64_t part = part_bytes(area_.slot_bytes(), size_);
  return static_cast<std::byte*>(scratch_.data_ptr()) + (piece % 2 * size_ + rank) * part;
}

template <typename Copy>
void StagedStreams::put(uint32_t piece, const Copy& copy) {
  const c10::StreamGuard on(out_);
  wait_for_others(out_, &DeviceArea::Words::done, piece - DeviceArea::kSlots);
  copy(area_.slot(rank_, piece));
  write(out_, &DeviceArea::Words::put, piece);
}

template <typename Copy>
void StagedStreams::take(uint32_t piece, const Copy& copy) {
  const c10::StreamGuard on(in_);
  summed_[piece % 2].block(in_);  // the scratch of two pieces before
  wait_for_others(in_, &DeviceArea::Words::put, piece);
  copy();
  arrived_[piece % 2].record(in_);
}

template <typename Copy>
void StagedStreams::in_pieces(int64_t bytes, int64_t piece_bytes, const Copy& copy) {
  for (int64_t at = 0; at < bytes; at += piece_bytes) {
    const uint32_t piece = ++piece_;
    copy(piece, at, std::min(piece_bytes, bytes - at));
  }
}

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
    if (reduce == ReduceType::AVG) total.div_(size_);
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

int64_t StagedStreams::agree_on_counts(const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                                       const Patience& patience) {
  const uint32_t number = all_to_alls_++;
  int64_t* const own = area_.counts(rank_, number);
  std::copy(sent.begin(), sent.end(), own);
  std::copy(received.begin(), received.end(), own + size_);
  area_.say_counts(rank_, number);
  int64_t most = 0;
  for (int other = 0; other < size_; ++other)
    while (!area_.has_counts(other, number)) {
      const std::string gone = ranks_->gone(area_.ranks()[other]);
      if (!gone.empty() && !area_.has_counts(other, number))
        ranks_->break_group(c10::str(patience.operation, ": ", gone));
      if (patience.over())
        ranks_->break_group(c10::str(patience.operation, ": rank ", ranks_->rank(), " timed out after ",
                                     patience.timeout.count(), " ms waiting for rank ",
                                     area_.ranks()[other]));
      ranks_->check_whole();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  for (int from = 0; from < size_; ++from)
    for (int to = 0; to < size_; ++to) {
      const int64_t sends = area_.counts(from, number)[to], takes = area_.counts(to, number)[size_ + from];
      if (sends != takes)
        ranks_->break_group(c10::str(patience.operation, ": rank ", from, " sends ", sends, " bytes to rank ",
                                     to, ", which receives ", takes, "; give both the same splits"));
      if (from != to) most = std::max(most, sends);
    }
  ranks_->check_whole();
  return most;
}

void StagedStreams::all_to_all(const Sources& sources, const std::vector<int64_t>& sent,
                               const Targets& targets, const std::vector<int64_t>& received,
                               at::ScalarType type, const Patience& patience) {
  agree({kAllToAll, static_cast<int32_t>(type), -1, -1, 0}, patience);
  const int64_t most = agree_on_counts(sent, received, patience);
  const int64_t piece_bytes = area_.slot_bytes() / size_ / kUnit * kUnit;
  const auto left = [](int64_t bytes, int64_t at, int64_t length) {
    return std::clamp<int64_t>(bytes - at, 0, length);
  };
  in_pieces(most, piece_bytes, [&](uint32_t piece, int64_t at, int64_t length) {
    put(piece, [&](std::byte* slot) {
      for (int to = 0; to < size_; ++to)
        if (to != rank_) copy_out(slot + to * piece_bytes, sources[to] + at, left(sent[to], at, length));
    });
    take(piece, [&] {
      for (int from = 0; from < size_; ++from)
        if (from != rank_)
          copy_in(targets[from] + at, area_.slot(from, piece) + rank_ * piece_bytes,
                  left(received[from], at, length));
    });
    write(in_, &DeviceArea::Words::done, piece);
  });
  const c10::StreamGuard on(adding_);
  copy(targets[rank_], device_, sources[rank_], device_, sent[rank_]);
}

}  // namespace oases
