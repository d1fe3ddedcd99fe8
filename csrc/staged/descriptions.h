// What ranks say of a collective of the `staged` backend before they make it, for one another to compare.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace oases {

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
  kMessage,
  kRefused
};

// left: collectives that follow in the same call.
struct Description {
  int32_t collective, type, reduce, root;
  int64_t bytes, left = 0;
};

bool alike(const Description& one, const Description& other);
// "rank 1 calls all_reduce with Float of 16 bytes by SUM"
std::string text_of(const Description& description, int rank);
// That two ranks, of which the first is `lower`, do not call the same.
std::string difference(const Description& one, int lower, const Description& other, int higher);
// What an exception says, as others are told it: without a backtrace.
std::string reason_of(const std::exception& error);

}  // namespace oases
