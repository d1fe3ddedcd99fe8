// Collectives of the ranks of one machine through shared memory, piece by piece.
#pragma once

#include <memory>
#include <vector>

#include "collectives.h"

namespace oases {

// Of the host's memory, through slots of shared memory. Where ranks are asked for different collectives, or one refuses,
// all raise the same ValueError, and the group can go on.
class StagedCollectives final : public Collectives {
 public:
  explicit StagedCollectives(std::shared_ptr<SharedRanks> ranks) : ranks_(std::move(ranks)) {}

  // Joins the others' collective in place of one that cannot be made here. Raises the error that they raise.
  void refuse(const std::string& reason, const Patience& patience);

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
  void barrier(const Patience& patience);

 private:
  class Call;

  std::shared_ptr<SharedRanks> ranks_;
};

}  // namespace oases
