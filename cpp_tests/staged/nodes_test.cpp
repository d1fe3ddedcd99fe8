#include "nodes.h"

#include <random>

using oases::NodesBackend;
using oases_tests::message_of;
using oases_tests::numbers;
using oases_tests::of_all;
using oases_tests::run_nodes;

namespace {

c10::intrusive_ptr<c10d::Work> reduce_all(NodesBackend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return backend.allreduce(tensors, {});
}

}  // namespace

TEST(NodesBackend, CollectivesThatAreUnderWayTogetherUnderRandomDelays) {
  run_nodes([](int rank, NodesBackend& backend) {
    std::mt19937 random(rank);
    const auto pause = [&] { std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000)); };
    for (const int64_t count : {0, 1, 77, 16'385, 1'300'001}) {  // the last of two pieces
      const auto sum = numbers(rank, count), again = numbers(rank, count);
      auto whole = at::empty({oases_tests::kOnNodes * count}), part = numbers(rank, count),
           mine = at::empty({count});
      auto input = of_all(count);
      std::vector<at::Tensor> sent{rank == 1 ? numbers(7, count) : at::zeros({count})};
      c10d::BroadcastOptions from_one;
      from_one.rootRank = 1;
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      works.push_back(reduce_all(backend, sum));
      pause();
      works.push_back(backend._allgather_base(whole, part, {}));
      works.push_back(backend.broadcast(sent, from_one));
      works.push_back(backend._reduce_scatter_base(mine, input, {}));
      pause();
      works.push_back(backend.barrier({}));
      works.push_back(reduce_all(backend, again));
      std::vector<at::Tensor> to{numbers(rank, count)}, from{at::empty({count})};
      works.push_back(backend.send(to, (rank + 1) % oases_tests::kOnNodes, 3));
      works.push_back(backend.recv(from, (rank + 3) % oases_tests::kOnNodes, 3));
      for (const auto& work : works) work->wait();
      EXPECT_TRUE(at::equal(sum, 4 * numbers(0, count) + 6) && at::equal(again, sum)) << count;
      EXPECT_TRUE(at::equal(whole, of_all(count))) << count;
      EXPECT_TRUE(at::equal(mine, 4 * numbers(rank, count))) << count;
      EXPECT_TRUE(at::equal(sent[0], numbers(7, count))) << count;
      EXPECT_TRUE(at::equal(from[0], numbers((rank + 3) % oases_tests::kOnNodes, count))) << count;
    }
  });
}

TEST(NodesBackend, CallsThatAllRanksMakeWronglyLeaveTheGroupAsItWas) {
  run_nodes([](int rank, NodesBackend& backend) {
    const auto why = message_of([&] { reduce_all(backend, at::zeros({4}).to_sparse())->wait(); });
    EXPECT_NE(why.find("takes dense tensors"), std::string::npos) << why;
    const auto tensor = at::ones({4});
    reduce_all(backend, tensor)->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 4.0)));
    backend.barrier({})->wait();
  });
}

TEST(NodesBackend, AnAbortEndsWaitsForAnotherNode) {
  std::atomic<int> ended{0};
  run_nodes([&](int rank, NodesBackend& backend) {
    backend.barrier({})->wait();
    if (rank % 2 == 0) {
      const auto work = reduce_all(backend, at::ones({4}));
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      backend.abort();
      EXPECT_NE(message_of([&] { work->wait(); }).find("aborted the group"), std::string::npos);
      EXPECT_NE(message_of([&] { reduce_all(backend, at::ones({4}))->wait(); }).find("aborted the group"),
                std::string::npos);
      ++ended;
    }
    while (ended < 2) std::this_thread::yield();
  });
}
