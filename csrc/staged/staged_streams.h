// Collectives of the tensors of accelerators of one machine: copy engines move them through slots of shared memory, and
// a kernel adds. All of it is queued at the call; no thread of the host and no kernel waits for a rank. Only in an
// all-to-all hosts wait until all have called it: its sizes are known to each rank in part.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "collectives.h"
#include "stream_watch.h"
#include "stream_words.h"
#include "under_way.h"

namespace oases {

// Where a rank's part of a piece begins and ends.
constexpr int64_t kUnit = 64;

inline int64_t part_bytes(int64_t bytes, int ranks) {
  return (bytes + ranks * kUnit - 1) / (ranks * kUnit) * kUnit;
}

// Of one device, and of all ranks of a group or of two. Where ranks are asked for different collectives, or one refuses, the group is given up: the streams of
// ranks that were earlier wait already.
class StagedStreams final : public Collectives {
 public:
  // ranks: that take part. streams: 3, or 1 where hardly anything would run at once.
  StagedStreams(std::shared_ptr<SharedRanks> ranks, c10::Device device, DeviceArea area, int streams);
  // Runs what is queued.
  ~StagedStreams() override;
  c10::Device device() const { return device_; }

  // Queues run(), which makes collectives, behind the current stream. used: tensors that they read and write. Raises
  // what run() does, and DistBackendError where the group was given up.
  template <typename Run>
  c10::intrusive_ptr<c10d::Work> queue(c10d::OpType type, std::vector<at::Tensor> outputs,
                                       const std::vector<at::Tensor>& used, const Patience& patience,
                                       const Run& run) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranks_->check_whole();
    const uint32_t turn = turn_;
    std::shared_ptr<Watched> watched;
    try {
      watched = begin(used, patience);
      run();
    } catch (const std::exception& error) {
      give_up(error, turn, patience);
      if (watched) end(type, {}, used, std::move(watched));  // what was queued
      throw;
    }
    return end(type, std::move(outputs), used, std::move(watched));
  }

  void all_reduce(std::byte* data, int64_t count, at::ScalarType type, ReduceType reduce, int root,
                  const Patience& patience) override;
  void reduce_scatter(const Sources& sources, std::byte* target, int64_t count, at::ScalarType type,
                      ReduceType reduce, const Patience& patience) override;
  void all_gather(const std::byte* source, const Targets& targets, int64_t bytes, at::ScalarType type,
                  int root, const Patience& patience) override;
  void all_to_all(const Sources& sources, const std::vector<int64_t>& sent, const Targets& targets,
                  const std::vector<int64_t>& received, at::ScalarType type,
                  const Patience& patience) override;
  void scatter(const Sources& sources, std::byte* target, int64_t bytes, at::ScalarType type, int root,
               const Patience& patience) override;
  void broadcast(std::byte* data, int64_t bytes, at::ScalarType type, int root,
                 const Patience& patience) override;
  // From the first of two ranks to the second.
  void message(std::byte* data, int64_t bytes, at::ScalarType type, const Patience& patience);

 private:
  void give(std::byte* data, int64_t bytes, int root);
  std::shared_ptr<Watched> begin(const std::vector<at::Tensor>& used, const Patience& patience);
  c10::intrusive_ptr<c10d::Work> end(c10d::OpType type, std::vector<at::Tensor> outputs,
                                     const std::vector<at::Tensor>& used, std::shared_ptr<Watched> watched);
  // Tells the others that this rank cannot make the collective `turn`, or not go on with it.
  void give_up(const std::exception& error, uint32_t turn, const Patience& patience);
  void agree(Description description, const Patience& patience, const std::string& reason = "");
  // Raises where others have said other numbers of bytes for the all-to-all at hand.
  void agree_on_counts(const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                       const Patience& patience);
  // Waits until may(), which becomes true once the slowest host has queued more; ahead: collectives that it lacks.
  template <typename May>
  void wait_for_hosts(const May& may, uint32_t ahead, const Patience& patience);

  // copy(piece, from which byte on, bytes) of each piece.
  template <typename Copy>
  void in_pieces(int64_t bytes, int64_t piece_bytes, const Copy& copy);
  // Steps of a piece: copy(slot) to this rank's slot, and copy() from the others'.
  template <typename Copy>
  void put(uint32_t piece, const Copy& copy);
  template <typename Copy>
  void take(uint32_t piece, const Copy& copy);
  void sum(uint32_t piece, const Sources& parts, int64_t count, at::ScalarType type, ReduceType reduce,
           std::byte* to);

  using Word = uint32_t DeviceArea::Words::*;
  void wait_for_others(const c10::Stream& stream, Word word, uint32_t piece);
  void write(const c10::Stream& stream, Word word, uint32_t piece);
  at::Tensor numbers(const std::byte* data, int64_t count, at::ScalarType type, c10::Device device) const;
  // On the current stream.
  void copy(std::byte* to, c10::Device to_device, const std::byte* from, c10::Device from_device,
            int64_t bytes) const;
  void copy_out(std::byte* slot, const std::byte* from, int64_t bytes) const;
  void copy_in(std::byte* to, const std::byte* slot, int64_t bytes) const;
  // Where a rank's part of a piece waits to be summed.
  std::byte* scratch(uint32_t piece, int rank) const;

  const std::shared_ptr<SharedRanks> ranks_;
  const c10::Device device_;
  const int rank_, size_;
  DeviceArea area_;
  StreamWords& words_;
  const c10::Stream out_, in_, adding_;  // to the host, to the device, sums
  std::mutex mutex_;
  uint32_t piece_ = 0;  // the latest
  DeviceArea::Pairs pairs_;
  uint32_t all_to_alls_ = 0;
  bool sums_ = false;  // what is being queued
  at::Tensor scratch_;
  std::vector<c10::Event> arrived_, summed_, sent_;  // by parity of pieces
  c10::Event ready_, put_, added_, taken_;           // for a collective as a whole
  UnderWay under_way_;
  std::unique_ptr<StreamWatch> watch_;
};

template <typename May>
void StagedStreams::wait_for_hosts(const May& may, uint32_t ahead, const Patience& patience) {
  while (!may()) {
    ranks_->check_whole();
    if (patience.over())
      ranks_->break_group(c10::str(patience.operation, ": rank ", ranks_->rank(), " timed out after ",
                                   patience.timeout.count(), " ms, because a rank's host is ", ahead,
                                   " collectives behind"));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
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

}  // namespace oases
