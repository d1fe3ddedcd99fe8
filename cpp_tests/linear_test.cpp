#include "linear.h"

#include "ranks.h"
#include "scheduler.h"

using at::Tensor;
using oases_tests::Group;
using oases_tests::run_ranks;

namespace {
// Small integers: every product and sum is exact, so chunking and summation order cannot change a bit.
Tensor integers(std::vector<int64_t> sizes, int seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randint(-2, 3, sizes, generator, at::kFloat);
}
Tensor part(const Tensor& whole, int64_t dim, int rank, int size) {
  return whole.chunk(size, dim)[rank].contiguous();
}
}  // namespace

// (batch, sequence), num_chunks
class Chunks : public ::testing::TestWithParam<std::tuple<std::pair<int64_t, int64_t>, int>> {
 protected:
  const int size = 2, chunks = std::get<1>(GetParam());
  const int64_t batch = std::get<0>(GetParam()).first, sequence = std::get<0>(GetParam()).second;
  const Tensor x = integers({batch, sequence, 6}, 1), weight = integers({8, 6}, 2), bias = integers({8}, 3),
               grad = integers({batch, sequence, 8}, 4);
  // Sequence parallelism splits the dimension that has enough entries for the chunks, the batch first.
  void expect_on_the_wire(const std::string& group, const char* label) const {
    const int64_t part = sequence / size;
    const auto totals = oases::OverlapScheduler::of(group)->totals();
    ASSERT_EQ(totals.count(label), 1u) << label;
    EXPECT_EQ(totals.at(label).count, std::min<int64_t>(chunks, std::max(batch, part))) << label;
  }
};

TEST_P(Chunks, ColumnEqualsLinear) {
  run_ranks(size, [&](int rank, const Group&, const std::string& group) {
    const Tensor w = part(weight, 0, rank, size), b = part(bias, 0, rank, size),
                 g = part(grad, -1, rank, size);
    EXPECT_TRUE(at::equal(oases::column_linear(x, w, b, group, chunks, false),
                          part(at::linear(x, weight, bias), -1, rank, size)));
    const auto [grad_x, grad_w, grad_b] = oases::column_linear_backward(g, x, w, group, chunks, false);
    EXPECT_TRUE(at::equal(grad_x, at::matmul(grad, weight)));
    EXPECT_TRUE(at::equal(grad_w, at::mm(g.view({-1, 4}).t(), x.view({-1, 6}))));
    EXPECT_TRUE(at::equal(grad_b, g.sum(at::IntArrayRef{0, 1})));

    const Tensor mine = part(x, 1, rank, size);
    oases::OverlapScheduler::of(group)->reset_totals();
    EXPECT_TRUE(at::equal(oases::column_linear(mine, w, b, group, chunks, true),
                          part(at::linear(x, weight, bias), -1, rank, size)));
    const auto [shard_x, shard_w, shard_b] = oases::column_linear_backward(g, mine, w, group, chunks, true);
    EXPECT_TRUE(at::equal(shard_x, part(at::matmul(grad, weight), 1, rank, size)));
    EXPECT_TRUE(at::equal(shard_w, grad_w));
    EXPECT_TRUE(at::equal(shard_b, grad_b));
    expect_on_the_wire(group, "column forward");
    expect_on_the_wire(group, "column backward");
  });
}

TEST_P(Chunks, RowEqualsLinear) {
  const Tensor expected = at::linear(x, weight, bias), expected_b = grad.sum(at::IntArrayRef{0, 1});
  run_ranks(size, [&](int rank, const Group&, const std::string& group) {
    const Tensor mine = part(x, -1, rank, size), w = part(weight, 1, rank, size);
    const Tensor expected_x = part(at::matmul(grad, weight), -1, rank, size);
    const Tensor expected_w = at::mm(grad.view({-1, 8}).t(), mine.view({-1, 3}));
    EXPECT_TRUE(at::equal(oases::row_linear(mine, w, bias, group, chunks, false), expected));
    auto [grad_x, grad_w, grad_b] = oases::row_linear_backward(grad, mine, w, group, chunks, false);
    EXPECT_TRUE(at::equal(grad_x, expected_x));
    EXPECT_TRUE(at::equal(grad_w, expected_w));
    EXPECT_TRUE(at::equal(grad_b, expected_b));

    oases::OverlapScheduler::of(group)->reset_totals();
    EXPECT_TRUE(
        at::equal(oases::row_linear(mine, w, bias, group, chunks, true), part(expected, 1, rank, size)));
    std::tie(grad_x, grad_w, grad_b) =
        oases::row_linear_backward(part(grad, 1, rank, size), mine, w, group, chunks, true);
    EXPECT_TRUE(at::equal(grad_x, expected_x));
    EXPECT_TRUE(at::equal(grad_w, expected_w));
    EXPECT_TRUE(at::equal(grad_b, expected_b));
    expect_on_the_wire(group, "row forward");
    expect_on_the_wire(group, "row backward");
  });
}

INSTANTIATE_TEST_SUITE_P(All, Chunks,
                         ::testing::Combine(::testing::Values(std::pair<int64_t, int64_t>{3, 4},
                                                              std::pair<int64_t, int64_t>{1, 14},
                                                              std::pair<int64_t, int64_t>{2, 10}),
                                            ::testing::Values(1, 2, 3, 5, 100)));
