// Collectives that streams make, as the host sees them: their works, and what ends them when a rank is lost.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device_area.h"
#include "device_work.h"
#include "shared_ranks.h"

namespace oases {

// A collective that has been queued. It has failed if the group is given up before anybody has seen its end.
class Watched {
 public:
  Watched(std::shared_ptr<const SharedRanks> ranks, c10::DeviceType type, Patience patience)
      : done(std::make_shared<c10::Event>(type)), patience(std::move(patience)), ranks_(std::move(ranks)) {}
  // Whether streams have come to its end.
  bool ended() const;
  std::exception_ptr failure() const;

  const std::shared_ptr<c10::Event> done;
  const Patience patience;
  uint32_t last_piece = 0;
  DeviceArea::Pairs pairs;
  bool sums = false;  // its pieces come back as sums

 private:
  const std::shared_ptr<const SharedRanks> ranks_;
  mutable std::mutex mutex_;
  mutable bool seen_ = false;
  mutable std::exception_ptr failure_;
};

class StagedWork final : public DeviceWork {
 public:
  StagedWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs, c10::Stream stream,
             std::shared_ptr<const Watched> watched)
      : DeviceWork(rank, type, std::move(outputs), stream, watched->done), watched_(std::move(watched)) {}
  bool isCompleted() override { return watched_->ended() || watched_->failure(); }
  bool isSuccess() const override { return watched_->ended() && !watched_->failure(); }
  std::exception_ptr exception() const override { return watched_->failure(); }

 private:
  std::string operation() const override { return watched_->patience.operation; }

  const std::shared_ptr<const Watched> watched_;
};

// Looks on a thread of its own what has been done, and whether a rank that is waited for has ended, has left or lets it
// wait too long. Then the group is given up: what has not been done fails, and all waits of streams end.
class StreamWatch {
 public:
  // rank: this one in the area.
  StreamWatch(std::shared_ptr<SharedRanks> ranks, DeviceArea area, int rank, c10::Device device);
  // Once all has been done.
  ~StreamWatch();
  void add(std::shared_ptr<Watched> watched);

 private:
  void serve();
  std::string why_never(const Watched& watched) const;
  using Behind = std::array<int32_t, 3>;
  Behind behind(int rank, const Watched& watched) const;
  std::string lost(const Watched& watched) const;
  std::string latest(const Watched& watched) const;

  const std::shared_ptr<SharedRanks> ranks_;
  DeviceArea area_;
  const int rank_;
  const c10::Device device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Watched>> watched_;
  bool closing_ = false;
  std::thread thread_;  // last member: the thread reads the others
};

}  // namespace oases
