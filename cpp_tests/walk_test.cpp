// The simplex walk against the minimum over a grid, and against itself from other starts.
#include "svm/walk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>
#include <vector>

namespace {

using oases::svm::Status;
using oases::svm::Walk;

struct Problem {
  int64_t n, m;
  std::vector<double> columns, weights, targets;
};

Problem drawn(int64_t n, int64_t m, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(1e-8, 2e-8);
  Problem problem{n, m, std::vector<double>(n * m), std::vector<double>(n, 1.0 / n), std::vector<double>(n)};
  for (double& value : problem.columns) value = normal(random);
  for (double& value : problem.targets) value = 1 + uniform(random);
  return problem;
}

double objective(const Problem& problem, const std::vector<double>& tau, const std::vector<double>& w) {
  double sum = 0;
  for (int64_t i = 0; i < problem.n; ++i) {
    double slack = problem.targets[i];
    for (int64_t j = 0; j < problem.m; ++j) slack -= problem.columns[j * problem.n + i] * w[j];
    sum += problem.weights[i] * std::max(slack, 0.0);
  }
  for (int64_t j = 0; j < problem.m; ++j) sum += tau[j] * std::abs(w[j]);
  return sum;
}

// Gaussian elimination.
std::vector<double> inverse_of(const Walk& walk) {
  const int64_t k = walk.size();
  std::vector<double> left(k * k), right(k * k);
  for (int64_t i = 0; i < k; ++i) {
    right[i * k + i] = 1;
    for (int64_t j = 0; j < k; ++j) left[i * k + j] = walk.matrix(i, j);
  }
  for (int64_t step = 0; step < k; ++step) {
    int64_t pivot = step;
    for (int64_t i = step; i < k; ++i) {
      if (std::abs(left[i * k + step]) > std::abs(left[pivot * k + step])) pivot = i;
    }
    for (int64_t j = 0; j < k; ++j) {
      std::swap(left[step * k + j], left[pivot * k + j]);
      std::swap(right[step * k + j], right[pivot * k + j]);
    }
    for (int64_t i = 0; i < k; ++i) {
      const double factor = (left[i * k + step] - (i == step ? 1.0 : 0.0)) / left[step * k + step];
      for (int64_t j = 0; j < k; ++j) {
        left[i * k + j] -= factor * left[step * k + j];
        right[i * k + j] -= factor * right[step * k + j];
      }
    }
  }
  return right;
}

bool minimised(Walk& walk, const std::vector<double>& tau, int64_t limit = 100000) {
  walk.begin();
  int64_t pivots = 0;
  double work = 0;
  for (;;) {
    const Status status = walk.minimise(tau.data(), limit, 1e15, &pivots, &work);
    if (status != Status::kRefresh) return status == Status::kMinimum;
    walk.refresh(inverse_of(walk).data(), false);
  }
}

TEST(WalkTest, NoPointOfAGridIsLower) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const Problem problem = drawn(15, 2, seed);
    const std::vector<double> tau{0.02, 0.05};
    Walk walk(problem.columns.data(), 15, 2, problem.weights.data(), problem.targets.data());
    ASSERT_TRUE(minimised(walk, tau));
    const double found = objective(problem, tau, walk.coefficients());
    for (double a = -6; a <= 6; a += 0.05) {
      for (double b = -6; b <= 6; b += 0.05) EXPECT_LE(found, objective(problem, tau, {a, b}) + 1e-12);
    }
  }
}

TEST(WalkTest, ColumnsAddedOnTheWayLeadToTheSameMinimum) {
  const Problem problem = drawn(60, 40, 1);
  const std::vector<double> tau(40, 0.01);
  Walk whole(problem.columns.data(), 60, 40, problem.weights.data(), problem.targets.data());
  ASSERT_TRUE(minimised(whole, tau));
  Walk grown(problem.columns.data(), 60, 3, problem.weights.data(), problem.targets.data());
  for (int64_t m = 3; m <= 40; m += 37) {
    ASSERT_TRUE(minimised(grown, tau));
    if (m == 3) grown.add(problem.columns.data() + 3 * 60, 37);
  }
  EXPECT_GT(grown.size(), 16);  // exceeds the initial capacity
  EXPECT_NEAR(objective(problem, tau, grown.coefficients()), objective(problem, tau, whole.coefficients()),
              1e-12);
}

TEST(WalkTest, ItEndsAfterTheStepsAndTheWorkAllowed) {
  const Problem problem = drawn(60, 40, 2);
  const std::vector<double> tau(40, 0.001);
  Walk walk(problem.columns.data(), 60, 40, problem.weights.data(), problem.targets.data());
  EXPECT_FALSE(minimised(walk, tau, 5));
  int64_t pivots = 0;
  double work = 0;
  EXPECT_EQ(walk.minimise(tau.data(), 1000, 0.0, &pivots, &work), Status::kLimit);
  EXPECT_EQ(pivots, 1);
  EXPECT_TRUE(minimised(walk, tau));
}

}  // namespace
