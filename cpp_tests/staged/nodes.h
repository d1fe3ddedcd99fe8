// Ranks on nodes, as threads of one process.
#pragma once

#include <string>

#include "ranks.h"
#include "staged/nodes_backend.h"

namespace oases_tests {

constexpr int kOnNodes = 4;
const std::vector<std::vector<int64_t>> kNodes{{0, 2}, {1, 3}};

// Four ranks as threads of this process, two on each of two nodes: a sanitizer sees the memory that they share.
inline void run_nodes(const std::function<void(int, oases::NodesBackend&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // Until all are done: one that went early would cut off those that still connect.
  std::vector<c10::intrusive_ptr<oases::NodesBackend>> connected(kOnNodes);
  on_threads(kOnNodes, [&](int rank) {
    const int node = rank % 2, place = rank / 2;
    const auto of = [&](const std::string& name) {
      return c10::make_intrusive<c10d::PrefixStore>(name, store);
    };
    const auto local = c10::make_intrusive<oases::StagedBackend>(of(c10::str("node ", node)), place, 2,
                                                                 std::chrono::seconds(60));
    const auto whole = gloo(of("whole"), rank, kOnNodes);
    connected[rank] = c10::make_intrusive<oases::NodesBackend>(whole, local, kNodes);
    body(rank, *connected[rank]);
  });
}

inline at::Tensor of_all(int64_t count) {
  return at::cat({numbers(0, count), numbers(1, count), numbers(2, count), numbers(3, count)});
}

}  // namespace oases_tests
