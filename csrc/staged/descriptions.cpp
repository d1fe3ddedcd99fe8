#include "descriptions.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstring>

#include "reduce_ranks.h"

namespace oases {

bool alike(const Description& one, const Description& other) {
  return std::memcmp(&one, &other, sizeof one) == 0;
}

std::string text_of(const Description& description, int rank) {
  constexpr const char* kNames[] = {"all_reduce", "reduce",  "reduce_scatter", "all_gather", "gather",
                                    "all_to_all", "scatter", "broadcast",      "barrier"};
  if (description.collective == kMessage)
    return c10::str("rank ", rank, " has a message of ", description.bytes, " bytes of ",
                    at::ScalarType(description.type));
  std::string text = c10::str("rank ", rank, " calls ", kNames[description.collective]);
  if (description.collective == kBarrier) return text;
  text += c10::str(" with ", at::ScalarType(description.type));
  if (description.collective != kAllToAll) text += c10::str(" of ", description.bytes, " bytes");
  if (description.root >= 0) text += c10::str(" and root ", description.root);
  if (description.reduce >= 0) text += c10::str(" by ", reduction_name(ReduceType(description.reduce)));
  if (description.left > 0) text += c10::str(", and ", description.left, " more");
  return text;
}

std::string difference(const Description& one, int lower, const Description& other, int higher) {
  return c10::str("ranks do not call the same collective: ", text_of(one, lower), ", ",
                  text_of(other, higher),
                  "; call it with the same sizes and types on all ranks of the group");
}

std::string reason_of(const std::exception& error) {
  const auto* const known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

}  // namespace oases
