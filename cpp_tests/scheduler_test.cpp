#include "scheduler.h"

#include "ranks.h"

using oases::OverlapScheduler;
using oases_tests::Group;
using oases_tests::run_ranks;

namespace {
at::Tensor filled(double value, int64_t n = 1000) { return at::full({n}, value); }

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Times out, and has ended when it is asked for that.
class LateWork : public c10d::Work {
 public:
  LateWork(c10::intrusive_ptr<c10d::Work> inner, std::string failure)
      : inner_(std::move(inner)), failure_(std::move(failure)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) {
      std::this_thread::sleep_for(timeout);
      TORCH_CHECK(false, "Operation timed out!");
    }
    inner_->wait();
    TORCH_CHECK(failure_.empty(), failure_);
    return true;
  }
  bool isCompleted() override { return inner_->isCompleted(); }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  const std::string failure_;
};

class LateBackend : public c10d::Backend {
 public:
  LateBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string failure)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), failure_(std::move(failure)) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return c10::make_intrusive<LateWork>(inner_->allreduce(tensors, options), failure_);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::string failure_;
};
}  // namespace

TEST(OverlapScheduler, ACollectiveThatEndsJustAfterALookIsNoFailure) {
  for (const std::string& failure : {std::string(), std::string("its own error")})
    run_ranks(
        2,
        [&](int rank, const Group& group, const std::string&) {
          OverlapScheduler scheduler(group);
          const auto tensor = filled(rank);
          const auto message = message_of([&] { scheduler.wait(scheduler.all_reduce(tensor, "F 0.0")); });
          if (failure.empty()) {
            EXPECT_EQ(message, "");
            EXPECT_TRUE(at::equal(tensor, filled(1)));
          } else {
            EXPECT_NE(message.find("which failed: its own error"), std::string::npos) << message;
          }
        },
        [&](auto inner) { return c10::make_intrusive<LateBackend>(inner, failure); });
}

TEST(OverlapScheduler, AllReduceSumsInPlaceAndTicketsMayBeWaitedInAnyOrder) {
  run_ranks(3, [](int rank, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    std::vector<at::Tensor> tensors;
    std::vector<std::shared_ptr<oases::Ticket>> tickets;
    for (int k = 0; k < 8; ++k) {
      tensors.push_back(filled(rank + 10 * k));
      tickets.push_back(scheduler.all_reduce(tensors[k], c10::str("F ", k)));
    }
    for (int k = 7; k >= 0; --k) scheduler.wait(tickets[k]);
    for (int k = 0; k < 8; ++k) EXPECT_TRUE(at::equal(tensors[k], filled(3 + 30 * k)));
  });
}

TEST(OverlapScheduler, AllGatherIsInRankOrderAndReduceScatterKeepsOwnPart) {
  run_ranks(2, [](int rank, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    const auto whole = at::empty({2, 5});
    scheduler.wait(scheduler.all_gather(whole, filled(rank, 5)));
    EXPECT_TRUE(at::equal(whole, at::stack({filled(0, 5), filled(1, 5)})));
    const auto part = at::empty({5});
    scheduler.wait(scheduler.reduce_scatter(part, at::arange(10, at::kFloat) * (rank + 1)));
    EXPECT_TRUE(at::equal(part, at::arange(10, at::kFloat).slice(0, 5 * rank, 5 * rank + 5) * 3));
  });
}

TEST(OverlapScheduler, AllToAllTakesUnevenRowsAndRanksWithNone) {
  run_ranks(3, [](int rank, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    // Rank r sends r * 2 rows to each rank but the last, which gets none: rank 0 sends nothing at all.
    const std::vector<int64_t> sent =
        rank ? std::vector<int64_t>{2 * rank, 2 * rank, 0} : std::vector<int64_t>{0, 0, 0};
    const std::vector<int64_t> received =
        rank < 2 ? std::vector<int64_t>{0, 2, 4} : std::vector<int64_t>{0, 0, 0};
    const auto input = at::full({4 * rank, 5}, rank, at::kDouble);
    const auto output = at::full({rank < 2 ? 6 : 0, 5}, -1, at::kDouble);
    scheduler.wait(scheduler.all_to_all(output, input, sent, received, "dispatch"));
    if (rank < 2) {
      EXPECT_TRUE(
          at::equal(output, at::cat({at::full({2, 5}, 1, at::kDouble), at::full({4, 5}, 2, at::kDouble)})));
    }
    const auto nothing = at::empty({0, 5});
    scheduler.wait(scheduler.all_to_all(nothing, nothing, {0, 0, 0}, {0, 0, 0}, "nothing"));
    EXPECT_EQ(scheduler.totals().at("dispatch").bytes, input.numel() * 8);
    EXPECT_EQ(scheduler.totals().at("nothing").count, 1);
    const auto message = message_of([&] { scheduler.all_to_all(output, input, {1, 0, 0}, {1, 0, 0}, "F"); });
    EXPECT_NE(message.find("all_to_all of F: the "), std::string::npos) << message;
  });
}

TEST(OverlapScheduler, CountsNothingWhileCountingIsOff) {
  run_ranks(2, [](int, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    scheduler.set_recording(true);
    for (const bool counting : {true, false, true}) {
      scheduler.set_counting(counting);
      const auto tensor = filled(1);
      scheduler.wait(scheduler.all_reduce(tensor, "F 0.0"));
    }
    EXPECT_EQ(scheduler.totals().at("F 0.0").count, 2);
    EXPECT_EQ(scheduler.take_records().size(), 2u);
  });
}

TEST(OverlapScheduler, CountsBytesAndTimesPerLabel) {
  run_ranks(2, [](int, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    scheduler.set_recording(true);
    for (int k = 0; k < 3; ++k) {
      const auto tensor = filled(1);
      scheduler.wait(scheduler.all_reduce(tensor, "F 0.0"));
    }
    const auto totals = scheduler.totals();
    ASSERT_EQ(totals.size(), 1u);
    EXPECT_EQ(totals.at("F 0.0").count, 3);
    EXPECT_EQ(totals.at("F 0.0").bytes, 3 * 4000);
    EXPECT_GT(totals.at("F 0.0").link_seconds, 0);
    const auto records = scheduler.take_records();
    ASSERT_EQ(records.size(), 3u);
    for (const auto& record : records) {
      EXPECT_EQ(record.collective, "all_reduce");
      EXPECT_LE(record.issued, record.waited_from);
      EXPECT_GE(record.finished, record.issued);
      EXPECT_GE(record.blocked_for, 0);
    }
    EXPECT_TRUE(scheduler.take_records().empty());
    scheduler.reset_totals();
    EXPECT_TRUE(scheduler.totals().empty());
  });
}

TEST(OverlapScheduler, KeepsTensorsAliveUntilWaited) {
  run_ranks(2, [](int, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    auto tensor = filled(1, 1 << 20);
    const c10::weak_intrusive_ptr<c10::TensorImpl> watch(tensor.getIntrusivePtr());
    const auto ticket = scheduler.all_reduce(tensor);
    tensor.reset();
    EXPECT_FALSE(watch.expired());
    scheduler.wait(ticket);
  });
}

TEST(OverlapScheduler, GroupOfOneReturnsAtOnce) {
  run_ranks(1, [](int, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    const auto tensor = filled(2), gathered = at::empty({1, 1000}), scattered = at::empty({1000});
    scheduler.wait(scheduler.all_reduce(tensor));
    scheduler.wait(scheduler.all_gather(gathered, tensor));
    scheduler.wait(scheduler.reduce_scatter(scattered, tensor));
    EXPECT_TRUE(at::equal(gathered[0], filled(2)));
    EXPECT_TRUE(at::equal(scattered, filled(2)));
  });
}

TEST(OverlapScheduler, ErrorsNameTheCollective) {
  run_ranks(2, [](int, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    const auto tensor = filled(1);
    const auto ticket = scheduler.all_reduce(tensor, "B 3.1");
    scheduler.wait(ticket);
    EXPECT_NE(message_of([&] { scheduler.wait(ticket); }).find("all_reduce of B 3.1 was waited for already"),
              std::string::npos);
    const auto strided = at::zeros({4, 6}).t();
    EXPECT_NE(message_of([&] { scheduler.all_reduce(strided, "F 0.0"); }).find("shape [6, 4]"),
              std::string::npos);
    EXPECT_NE(
        message_of([&] { scheduler.all_gather(filled(0, 9), filled(0, 5)); }).find("group size 2 x input 5"),
        std::string::npos);
  });
}

TEST(OverlapScheduler, IsSharedByNameAndNeedsALivingGroup) {
  std::string kept;
  run_ranks(2, [&](int rank, const Group&, const std::string& name) {
    EXPECT_EQ(OverlapScheduler::of(name), OverlapScheduler::of(name));
    EXPECT_EQ(OverlapScheduler::of(name)->rank(), rank);
    if (rank == 0) kept = name;
  });
  EXPECT_NE(message_of([&] { OverlapScheduler::of(kept); }), "");
}

TEST(OverlapScheduler, LostRankIsAnErrorThatNamesWhatWasWaitedFor) {
  const auto message = message_of([] {
    run_ranks(2, [](int rank, const Group& group, const std::string&) {
      if (rank == 1) return;  // leaves: its sockets close
      OverlapScheduler scheduler(group);
      scheduler.wait(scheduler.all_reduce(filled(1), "F 3.1"));
    });
  });
  EXPECT_NE(message.find("rank 0 waited for all_reduce of F 3.1 (4000 bytes"), std::string::npos) << message;
}

TEST(OverlapScheduler, AHaltEndsWaitsForACollectiveThatOneRankDidNotStart) {
  std::atomic<bool> started = false;
  run_ranks(2, [&](int rank, const Group& group, const std::string&) {
    OverlapScheduler scheduler(group);
    scheduler.wait(scheduler.all_reduce(filled(1), "before"));
    std::shared_ptr<oases::Ticket> ticket;
    if (rank == 1) ticket = scheduler.all_reduce(filled(1), "F 1.0");
    if (rank == 1) started = true;
    while (!started) std::this_thread::yield();
    if (rank == 0) OverlapScheduler::halt("rank 0 failed");  // of this process, so of both
    const auto message = message_of([&] {
      while (rank == 0) scheduler.all_reduce(filled(1), "F 0.0");
      scheduler.wait(ticket);
    });
    EXPECT_NE(message.find("rank 0 failed"), std::string::npos) << message;
  });
  OverlapScheduler::go_on();
}
