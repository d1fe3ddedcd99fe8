#include "sim_backend.h"

#include <thread>

#include "ranks.h"
#include "scheduler.h"

using oases::OverlapScheduler;
using oases_tests::Group;
using oases_tests::run_ranks;

namespace {
constexpr double kStartup = 0.02, kBandwidth = 1e6;
c10::intrusive_ptr<c10d::Backend> slow(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<oases::SimBackend>(std::move(inner), kStartup, kBandwidth);
}
}  // namespace

TEST(SimBackend, MovesTheDataAndTakesStartupPlusBytesOverBandwidthOneAfterAnother) {
  run_ranks(
      2,
      [](int rank, const Group& group, const std::string&) {
        OverlapScheduler scheduler(group);
        const auto first = at::full({5000}, rank + 1.0), second = at::full({5000}, rank + 2.0);
        const double begin = oases::monotonic_seconds();
        const auto one = scheduler.all_reduce(first), two = scheduler.all_reduce(second);
        scheduler.wait(one);
        scheduler.wait(two);
        // Two ranks send half the tensor twice: 20,000 bytes each time. Sleeping can only take longer.
        EXPECT_GE(oases::monotonic_seconds() - begin, 2 * (kStartup + 20000 / kBandwidth));
        EXPECT_TRUE(at::equal(first, at::full({5000}, 3.0)));
        EXPECT_TRUE(at::equal(second, at::full({5000}, 5.0)));
      },
      slow);
}

TEST(SimBackend, CommunicationRunsWhileTheCallerIsBusy) {
  run_ranks(
      2,
      [](int, const Group& group, const std::string&) {
        OverlapScheduler scheduler(group);
        const auto tensor = at::ones({5000});
        const auto ticket = scheduler.all_reduce(tensor);
        std::this_thread::sleep_for(std::chrono::milliseconds(400));
        scheduler.wait(ticket);
        EXPECT_LT(ticket->record().finished, ticket->record().waited_from);
        EXPECT_GE(ticket->record().finished - ticket->record().issued, kStartup + 20000 / kBandwidth);
      },
      slow);
}

TEST(SimBackend, OtherCollectivesMoveTheirData) {
  run_ranks(
      2,
      [](int rank, const Group& group, const std::string&) {
        OverlapScheduler scheduler(group);
        const auto whole = at::empty({2, 5}), part = at::empty({5});
        scheduler.wait(scheduler.all_gather(whole, at::full({5}, static_cast<double>(rank))));
        EXPECT_EQ(whole.sum().item<double>(), 5);
        scheduler.wait(scheduler.reduce_scatter(part, at::ones({10})));
        EXPECT_TRUE(at::equal(part, at::full({5}, 2.0)));
        std::vector<at::Tensor> sent{at::full({3}, static_cast<double>(rank))};
        group->broadcast(sent)->wait();
        EXPECT_TRUE(at::equal(sent[0], at::zeros({3})));
        auto received = at::empty({4}), given = at::full({4}, static_cast<double>(rank));
        std::vector<int64_t> none;
        group->alltoall_base(received, given, none, none)->wait();
        EXPECT_TRUE(at::equal(received, at::tensor({0.0, 0.0, 1.0, 1.0}, at::kFloat)));
        group->barrier()->wait();
      },
      slow);
}

TEST(SimBackend, RefusesPartsThatDoNotCutTheTensor) {
  run_ranks(
      2,
      [](int, const Group& group, const std::string&) {
        auto whole = at::empty({3}), equal = at::empty({4});
        std::vector<int64_t> none;
        const std::vector<std::vector<int64_t>> all{{}, {3}, {1, 1}};
        for (std::vector<int64_t> splits : all) {
          EXPECT_ANY_THROW(group->alltoall_base(whole, equal, splits, none));
          EXPECT_ANY_THROW(group->alltoall_base(equal, whole, none, splits));
        }
      },
      slow);
}

TEST(SimBackend, RefusesALinkThatCannotBe) {
  EXPECT_ANY_THROW(run_ranks(
      1, [](int, const Group&, const std::string&) {},
      [](auto inner) { return c10::make_intrusive<oases::SimBackend>(inner, 0.0, 0.0); }));
}
