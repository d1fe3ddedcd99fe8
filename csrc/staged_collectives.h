// Collectives of the ranks of one machine through shared memory, piece by piece.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "reduce_ranks.h"
#include "shared_ranks.h"

namespace oases {

// Memory that is read, or written, for each rank.
using Sources = std::vector<const std::byte*>;
using Targets = std::vector<std::byte*>;

// One after another, in the same order on all ranks. Before data are used, ranks compare what they were asked for;
// where it differs, or a rank refuses, all raise the same ValueError, and the group can go on.
class StagedCollectives {
 public:
  // From so many bytes between two ranks on, an all-to-all reads them from the other's memory, where the kernel permits
  // it: one copy instead of two, but the kernel looks up every page. INT64_MAX: never.
  static constexpr int64_t kReadFrom = 1 << 20;
  // Bytes of a rank's slot that an all-to-all uses otherwise, at most the slot: pieces that stay in a cache.
  static constexpr int64_t kAllToAllSlot = 1 << 20;

  // read_from: instead of kReadFrom.
  explicit StagedCollectives(std::shared_ptr<SharedRanks> ranks, int64_t read_from = kReadFrom)
      : ranks_(std::move(ranks)), read_from_(ranks_->read_others() ? read_from : INT64_MAX) {}

  // Number of collectives that this rank has joined.
  uint32_t turn() const { return turn_; }
  // For the next collective: so many follow in the same call, of which others must know.
  void followed_by(int64_t left) { left_ = left; }
  // Joins the others' collective in place of one that cannot be made here. Raises the error that they raise.
  void refuse(const std::string& reason, const Patience& patience);

  // In place; root: the only rank to get the result, or -1. Ranks' numbers are reduced in the order of ranks, so the
  // result is the same to the bit on all of them, whatever the size.
  void all_reduce(std::byte* data, int64_t count, at::ScalarType type, ReduceType reduce, int root,
                  const Patience& patience);
  // sources: `count` numbers for each rank.
  void reduce_scatter(const Sources& sources, std::byte* target, int64_t count, at::ScalarType type,
                      ReduceType reduce, const Patience& patience);
  // root: the only rank with targets, or -1.
  void all_gather(const std::byte* source, const Targets& targets, int64_t bytes, at::ScalarType type,
                  int root, const Patience& patience);
  void all_to_all(const Sources& sources, const std::vector<int64_t>& sent, const Targets& targets,
                  const std::vector<int64_t>& received, at::ScalarType type, const Patience& patience);
  void scatter(const Sources& sources, std::byte* target, int64_t bytes, at::ScalarType type, int root,
               const Patience& patience);
  void broadcast(std::byte* data, int64_t bytes, at::ScalarType type, int root, const Patience& patience);
  void barrier(const Patience& patience);

 private:
  enum Collective : int32_t {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kAllGather,
    kGather,
    kAllToAll,
    kScatter,
    kBroadcast,
    kBarrier,
    kRefused
  };
  class Call;

  std::shared_ptr<SharedRanks> ranks_;
  const int64_t read_from_;
  uint32_t turn_ = 0;
  int64_t left_ = 0;
};

}  // namespace oases
