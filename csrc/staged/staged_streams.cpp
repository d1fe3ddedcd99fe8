#include "staged_streams.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace oases {
namespace {

int place_of(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
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
      added_(device.type()),
      taken_(device.type()) {
  pairs_.given.resize(size_), pairs_.taken.resize(size_);
  const c10::StreamGuard on(in_);
  if (streams > 1) {  // and so sums
    const int64_t bytes = 2 * size_ * part_bytes(area_.slot_bytes(), size_);
    scratch_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    arrived_[0].record(in_), arrived_[0].block(adding_);  // the memory is there
  }
  words_.add_memory(area_.memory(), area_.memory_bytes());
  watch_ = std::make_unique<StreamWatch>(ranks_, area_, rank_, device_);
}

StagedStreams::~StagedStreams() {
  watch_.reset();
  try {
    const c10::StreamGuard on(in_);
    words_.remove_memory(area_.memory());
  } catch (const std::exception& error) {
    // After a failed kernel every call fails so, and a destructor must not.
    TORCH_WARN("staged: rank ", ranks_->rank(), " keeps its memory pinned: ", reason_of(error));
  }
}

std::shared_ptr<Watched> StagedStreams::begin(const std::vector<at::Tensor>& used, const Patience& patience) {
  auto watched = std::make_shared<Watched>(ranks_, device_.type(), patience);
  ready_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  for (const auto& stream : {out_, in_, adding_}) ready_.block(stream);
  under_way_.wait_for(used, {out_, in_, adding_});
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
  for (at::Tensor tensor : used)
    if (tensor.device() == device_) tensor.record_stream(in_);  // one elsewhere was refused
  watched->last_piece = piece_;
  watched->pairs = pairs_;
  watched->sums = sums_;
  watch_->add(watched);
  under_way_.add(used, watched->done);
  return c10::make_intrusive<StagedWork>(ranks_->rank(), type, std::move(outputs), in_, std::move(watched));
}

void StagedStreams::give_up(const std::exception& error, uint32_t turn, const Patience& patience) {
  const std::string reason = reason_of(error);
  left_ = 0;
  if (turn_ == turn)
    agree({kRefused, 0, -1, -1, 0}, patience, reason);
  else
    ranks_->break_group(c10::str(patience.operation, ": rank ", ranks_->rank(), " failed: ", reason));
}

// The collective at hand is the next one of all ranks.
void StagedStreams::agree(Description description, const Patience& patience, const std::string& reason) {
  const uint32_t turn = turn_;
  wait_for_hosts([&] { return area_.may_say(turn); }, DeviceArea::kAhead, patience);
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

}  // namespace oases
