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
// where it differs all raise the same ValueError, and the group can go on.
class StagedCollectives {
 public:
  explicit StagedCollectives(std::shared_ptr<SharedRanks> ranks) : ranks_(std::move(ranks)) {}

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
    kBarrier
  };
  class Call;

  std::shared_ptr<SharedRanks> ranks_;
  uint32_t turn_ = 0;
};

}  // namespace oases
