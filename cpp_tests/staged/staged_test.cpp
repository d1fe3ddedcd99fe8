#include "staged/staged_backend.h"

#include <random>

#include "ranks.h"

using oases::StagedBackend;
using oases_tests::message_of;
using oases_tests::numbers;
using oases_tests::on_threads;

namespace {

using Backend = c10::intrusive_ptr<StagedBackend>;

// Ranks as threads of this process, which share the mapping: a race in shared memory is one that a sanitizer sees.
void run_staged(int size, const std::function<void(int, StagedBackend&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  on_threads(size, [&](int rank) {
    const auto backend = c10::make_intrusive<StagedBackend>(store, rank, size, std::chrono::seconds(60));
    body(rank, *backend);
  });
}

c10::intrusive_ptr<c10d::Work> reduce_all(StagedBackend& backend, const at::Tensor& tensor, bool async = true,
                                          std::chrono::milliseconds timeout = c10d::kUnsetTimeout) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = async;
  options.timeout = timeout;
  return backend.allreduce(tensors, options);
}

// One piece, several pieces, and the two sides of the size where ranks meet once.
const int64_t kCounts[] = {0, 1, 77, 16384, 16385, 300'000, 1'200'001};

}  // namespace

TEST(StagedBackend, CollectivesOfAllSizesUnderRandomDelays) {
  constexpr int kSize = 3;
  run_staged(kSize, [](int rank, StagedBackend& backend) {
    std::mt19937 random(rank);
    const auto pause = [&] { std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000)); };
    for (const int64_t count : kCounts) {
      const auto sum = numbers(0, count) + numbers(1, count) + numbers(2, count);
      const auto mine = numbers(rank, count), again = mine.clone();
      const auto first = reduce_all(backend, mine);
      pause();
      reduce_all(backend, again, false)->wait();
      EXPECT_TRUE(first->isCompleted());  // before the one that follows it
      EXPECT_TRUE(at::equal(mine, sum) && at::equal(again, sum)) << count;

      auto whole = at::empty({kSize * count}), part = numbers(rank, count);
      backend._allgather_base(whole, part, {})->wait();
      EXPECT_TRUE(at::equal(whole, at::cat({numbers(0, count), numbers(1, count), numbers(2, count)})));
      pause();
      backend._reduce_scatter_base(part, whole, {})->wait();
      EXPECT_TRUE(at::equal(part, 3 * numbers(rank, count)));

      std::vector<at::Tensor> sent{rank == 1 ? numbers(7, count) : at::zeros({count})};
      c10d::BroadcastOptions from_one;
      from_one.rootRank = 1;
      backend.broadcast(sent, from_one)->wait();
      EXPECT_TRUE(at::equal(sent[0], numbers(7, count)));
      pause();

      // Rank r sends count + s numbers to rank s.
      std::vector<int64_t> counts_sent, counts_received(kSize, count + rank);
      for (int to = 0; to < kSize; ++to) counts_sent.push_back(count + to);
      auto input = at::full({3 * count + 3}, static_cast<double>(rank)),
           output = at::empty({3 * (count + rank)});
      backend.alltoall_base(output, input, counts_received, counts_sent, {})->wait();
      for (int from = 0; from < kSize; ++from)
        EXPECT_TRUE(at::equal(output.narrow(0, from * (count + rank), count + rank),
                              at::full({count + rank}, static_cast<double>(from))));
    }
    backend.barrier({})->wait();
  });
}

TEST(StagedBackend, MessagesArriveByTagWhateverTheOrder) {
  run_staged(2, [](int rank, StagedBackend& backend) {
    constexpr int64_t kLarge = 400'000;  // more than a channel holds
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> received;
    for (const int tag : {0, 1, 2, 3}) {
      std::vector<at::Tensor> sent{at::full({tag % 2 ? kLarge : 3}, 10.0 * rank + tag)};
      works.push_back(backend.send(sent, 1 - rank, tag));
    }
    for (const int tag : {2, 3, 1, 0}) {
      std::vector<at::Tensor> into{at::empty({tag % 2 ? kLarge : 3})};
      received.push_back(into[0]);
      works.push_back(tag == 1 ? backend.recvAnysource(into, tag) : backend.recv(into, 1 - rank, tag));
    }
    for (const auto& work : works) work->wait();
    EXPECT_EQ(works[6]->sourceRank(), 1 - rank);
    const int tags[] = {2, 3, 1, 0};
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(at::equal(received[i], at::full_like(received[i], 10 * (1 - rank) + tags[i])))
          << tags[i] << ": " << received[i].narrow(0, 0, 3);
  });
}

TEST(StagedBackend, RanksThatDifferAllSaySoAndGoOn) {
  run_staged(3, [](int rank, StagedBackend& backend) {
    EXPECT_EQ(message_of([&] { reduce_all(backend, at::zeros({rank == 2 ? 8 : 4}))->wait(); }),
              "ranks do not call the same collective: rank 0 calls all_reduce with Float of 16 bytes by SUM, "
              "rank 2 "
              "calls all_reduce with Float of 32 bytes by SUM; call it with the same sizes and types on all "
              "ranks of "
              "the group");
    const auto type = rank == 1 ? at::kInt : at::kFloat;
    EXPECT_NE(message_of([&] { reduce_all(backend, at::zeros({4}, type))->wait(); })
                  .find("rank 1 calls all_reduce "
                        "with Int of 16 bytes"),
              std::string::npos);
    std::vector<int64_t> sent{1, 1, rank == 0 ? 2 : 1}, received{1, 1, 1};
    auto input = at::zeros({rank == 0 ? 4 : 3}), output = at::zeros({3});
    EXPECT_EQ(message_of([&] { backend.alltoall_base(output, input, received, sent, {})->wait(); }),
              "all_to_all: rank 0 sends 8 bytes to rank 2, which receives 4; give both the same splits");
    const auto tensor = at::ones({4});
    reduce_all(backend, tensor)->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 3.0)));
  });
}

TEST(StagedBackend, ACallThatOneRankRefusesIsAnErrorOnAllAndTheyGoOn) {
  run_staged(3, [](int rank, StagedBackend& backend) {
    for (const bool async : {true, false}) {
      const auto gaps = at::zeros({8}).slice(0, 0, 8, 2);
      const auto message =
          message_of([&] { reduce_all(backend, rank == 1 ? gaps : at::zeros({4}), async)->wait(); });
      EXPECT_EQ(message.find("rank 1 was refused its call: all_reduce: the tensor of shape [4]"), 0u)
          << message;
      const auto tensor = at::ones({4});
      reduce_all(backend, tensor, async)->wait();
      EXPECT_TRUE(at::equal(tensor, at::full({4}, 3.0)));
    }
  });
}

TEST(StagedBackend, AMessageOfAnotherTypeIsAnError) {
  run_staged(2, [](int rank, StagedBackend& backend) {
    std::vector<at::Tensor> numbers{at::ones({4}, rank == 0 ? at::kFloat : at::kInt)};
    if (rank == 0) return backend.send(numbers, 1, 0)->wait(), backend.barrier({})->wait(), void();
    EXPECT_EQ(
        message_of([&] { backend.recv(numbers, 0, 0)->wait(); }),
        "recv: rank 0 sent 16 bytes of Float, rank 1 receives 16 of Int; give both the same size and type");
    EXPECT_TRUE(at::equal(numbers[0], at::ones({4}, at::kInt)));
    backend.barrier({})->wait();
  });
}

TEST(StagedBackend, ARankThatLeavesIsNamedByAllThatWaitForIt) {
  run_staged(3, [](int rank, StagedBackend& backend) {
    if (rank == 2) return;
    std::vector<at::Tensor> into{at::empty({4})};
    const auto work = backend.recv(into, 2, 0);
    EXPECT_EQ(message_of([&] { reduce_all(backend, at::ones({4}))->wait(); }),
              "all_reduce: rank 2 has left the group");
    EXPECT_NE(message_of([&] { work->wait(); }).find("rank 2 has left the group"), std::string::npos);
    EXPECT_EQ(message_of([&] { backend.barrier({})->wait(); }), "all_reduce: rank 2 has left the group");
  });
}

TEST(StagedBackend, ATimeoutNamesTheMissingRankOnAll) {
  std::atomic<int> ended{0};
  run_staged(3, [&](int rank, StagedBackend& backend) {
    backend.barrier({})->wait();
    while (rank == 1 && ended < 2) std::this_thread::yield();
    const auto timeout = std::chrono::milliseconds(300);
    const std::string message =
        message_of([&] { reduce_all(backend, at::ones({4}), true, timeout)->wait(); });
    EXPECT_NE(message.find("timed out after 300 ms waiting for rank 1"), std::string::npos) << message;
    ++ended;
  });
}

TEST(StagedBackend, AbortEndsTheWaitsOfAll) {
  run_staged(2, [](int rank, StagedBackend& backend) {
    std::vector<at::Tensor> into{at::empty({4})};
    const auto message = backend.recv(into, 1 - rank, 0);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      backend.abort();
    } else {
      EXPECT_EQ(message_of([&] { reduce_all(backend, at::ones({4}))->wait(); }),
                "staged: rank 1 aborted the group");
    }
    EXPECT_NE(message_of([&] { message->wait(); }).find("rank 1 aborted the group"), std::string::npos);
  });
}
