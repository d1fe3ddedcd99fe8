// Collectives on memory of one kind, of the host or of a device.
#pragma once

#include <cstddef>
#include <vector>

#include "reduce_ranks.h"
#include "shared_ranks.h"

namespace oases {

// Memory that is read, or written, for each rank.
using Sources = std::vector<const std::byte*>;
using Targets = std::vector<std::byte*>;

// One after another, in the same order on all ranks. Before data are used, ranks compare what they were asked for.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // In place; root: the only rank to get the result, or -1. Ranks' numbers are reduced in the order of ranks, so the
  // result is the same to the bit on all of them, whatever the size.
  virtual void all_reduce(std::byte* data, int64_t count, at::ScalarType type, ReduceType reduce, int root,
                          const Patience& patience) = 0;
  // sources: `count` numbers for each rank.
  virtual void reduce_scatter(const Sources& sources, std::byte* target, int64_t count, at::ScalarType type,
                              ReduceType reduce, const Patience& patience) = 0;
  // root: the only rank with targets, or -1.
  virtual void all_gather(const std::byte* source, const Targets& targets, int64_t bytes, at::ScalarType type,
                          int root, const Patience& patience) = 0;
  virtual void all_to_all(const Sources& sources, const std::vector<int64_t>& sent, const Targets& targets,
                          const std::vector<int64_t>& received, at::ScalarType type,
                          const Patience& patience) = 0;
  virtual void scatter(const Sources& sources, std::byte* target, int64_t bytes, at::ScalarType type,
                       int root, const Patience& patience) = 0;
  virtual void broadcast(std::byte* data, int64_t bytes, at::ScalarType type, int root,
                         const Patience& patience) = 0;

  // Number of collectives that this rank has joined.
  uint32_t turn() const { return turn_; }
  // For the next collective: so many follow in the same call, of which others must know.
  void followed_by(int64_t left) { left_ = left; }

 protected:
  uint32_t turn_ = 0;
  int64_t left_ = 0;
};

}  // namespace oases
