#include "walk.h"

#include <cmath>
#include <utility>

#include "dense.h"

namespace oases::svm {

namespace {

constexpr double kRate = 1e-11;   // rates of change below it count as 0: columns have mean square 1
constexpr double kFlat = 1e-10;   // fraction of the first slope below which only rounding is left
constexpr double kDrift = 1e-10;  // tolerance for coefficients and inverse
constexpr double kSlack = 1e-9;   // fraction of its weight by which a multiplier may exceed its bounds
constexpr int64_t kRefresh = 100, kChecked = 20;
constexpr int64_t kPriced = 6;  // edges measured exactly in the search for the steepest one

double sign_of(double value) { return value > 0 ? 1.0 : value < 0 ? -1.0 : 0.0; }

// Indices of the largest positive values, at most kPriced, in ascending order.
class Largest {
 public:
  void offer(double value, int64_t place) {
    if (value <= least_) return;
    if (count_ < kPriced) {
      values_[count_] = value, places_[count_++] = place;
    } else {
      const int64_t at = std::min_element(values_, values_ + kPriced) - values_;
      values_[at] = value, places_[at] = place;
    }
    if (count_ == kPriced) least_ = *std::min_element(values_, values_ + kPriced);
  }
  int64_t count() const { return count_; }
  int64_t place(int64_t i) const { return places_[i]; }
  double value(int64_t i) const { return values_[i]; }

 private:
  double values_[kPriced], least_ = 0;
  int64_t places_[kPriced], count_ = 0;
};

}  // namespace

Walk::Walk(const double* columns, int64_t n, int64_t m, const double* weights, const double* targets)
    : n_(n), m_(0), capacity_(0), c_(weights, weights + n), t_(targets, targets + n) {
  tight_.assign(n, 0);
  active_.assign(n, 1);
  slack_ = t_;
  have_room(16);
  add(columns, m);
}

void Walk::have_room(int64_t size) {
  if (size <= room_) return;
  const int64_t room = std::max(size, 2 * room_), k = this->size();
  std::vector<double> inverse(room * room);
  for (int64_t i = 0; i < k; ++i) std::copy_n(inverse_row(i), k, inverse.data() + i * room);
  inverse_ = std::move(inverse);
  edge_rows_.resize(room * width_);
  room_ = room;
}

void Walk::have_width(int64_t columns) {
  if (columns <= width_) return;
  const int64_t width = std::max(columns, 2 * width_);
  std::vector<double> rows(room_ * width);
  for (int64_t i = 0; i < size(); ++i) std::copy_n(edge_row(i), m_, rows.data() + i * width);
  edge_rows_ = std::move(rows);
  width_ = width;
}

void Walk::pair(int64_t j, int64_t i) {
  have_room(size() + 1);
  s_.push_back(j), e_.push_back(i);
  basic_[j] = tight_[i] = 1;
  for (int64_t other = 0; other < m_; ++other) edge_rows_[(size() - 1) * width_ + other] = column(other)[i];
}

void Walk::add(const double* columns, int64_t more) {
  if (m_ + more > capacity_) {
    const int64_t capacity = std::max(m_ + more, capacity_ ? 2 * (m_ + more) : 0);
    std::shared_ptr<double[]> store(new double[capacity * n_]);
    std::copy_n(store_.get(), m_ * n_, store.get());
    store_ = std::move(store), capacity_ = capacity;
  }
  have_width(m_ + more);
  std::copy_n(columns, more * n_, store_.get() + m_ * n_);
  w_.resize(m_ + more), sign_.resize(m_ + more), basic_.resize(m_ + more), pull_.resize(m_ + more);
  for (int64_t j = m_; j < m_ + more; ++j) {
    for (int64_t i = 0; i < size(); ++i) edge_rows_[i * width_ + j] = column(j)[e_[i]];
    double pull = 0;
    for (int64_t i = 0; i < n_; ++i) pull += active_[i] ? c_[i] * column(j)[i] : 0.0;
    pull_[j] = pull;
  }
  m_ += more;
}

void Walk::refresh(const double* inverse, bool reset) {
  const int64_t k = size();
  std::vector<double> tight(k), coefficients(k);
  for (int64_t i = 0; i < k; ++i) {
    std::copy_n(inverse + i * k, k, inverse_row(i));
    tight[i] = t_[e_[i]];
  }
  std::fill(w_.begin(), w_.end(), 0.0);
  for (int64_t i = 0; i < k; ++i) {
    w_[s_[i]] = dot(inverse_row(i), tight.data(), k);
    if (w_[s_[i]] != 0) sign_[s_[i]] = sign_of(w_[s_[i]]);
    coefficients[i] = -w_[s_[i]];
  }
  slack_ = t_;
  add_combination(slack_.data(), coefficients.data(), k, n_, [&](int64_t i) { return column(s_[i]); });
  for (int64_t i = 0; i < n_; ++i) {
    if (std::abs(slack_[i]) > (reset ? 0.0 : 10 * kRate)) active_[i] = slack_[i] > 0;
  }
  std::vector<double> inside(n_);
  for (const int64_t row : e_) slack_[row] = 0, active_[row] = 0;
  for (int64_t i = 0; i < n_; ++i) inside[i] = active_[i] ? c_[i] : 0.0;
  for (int64_t j = 0; j < m_; ++j) pull_[j] = dot(column(j), inside.data(), n_);
  since_ = 0, fresh_ = true;
}

void Walk::begin() {
  for (const int64_t j : s_) sign_[j] = w_[j] != 0 ? sign_of(w_[j]) : 1.0;
}

Status Walk::minimise(const double* tau, int64_t limit, double allowed, int64_t* pivots, double* work) {
  for (;; *work += work_of_pivot()) {
    if (since_ >= std::max(kRefresh, size()) || (since_ % kChecked == kChecked - 1 && drifted())) {
      return Status::kRefresh;
    }
    Edge edge;
    if (!find_edge(tau, &edge)) return since_ == 0 || !drifted() ? Status::kMinimum : Status::kRefresh;
    if (*pivots == limit || *work > allowed) return Status::kLimit;
    ++*pivots;
    if (!follow(tau, edge))
      return fresh_ ? Status::kMinimum : Status::kRefresh;  // fresh: only rounding is left
    ++since_, fresh_ = false;
  }
}

// Approximate; terms that do not grow with the data count as a few thousand.
double Walk::work_of_pivot() const {
  const double k = static_cast<double>(size()), n = static_cast<double>(n_), m = static_cast<double>(m_);
  return 5e3 + k * (n + m + 10 * k) + 10 * n + static_cast<double>(crossed_.size()) * m;
}

bool Walk::drifted() const {
  const int64_t k = size();
  std::vector<double> tight(k), fresh_weights(k);
  for (int64_t i = 0; i < k; ++i) tight[i] = t_[e_[i]];
  for (int64_t i = 0; i < k; ++i) fresh_weights[i] = dot(inverse_.data() + i * room_, tight.data(), k);
  for (int64_t i = 0; i < k; ++i) {
    double kept = -tight[i], computed = -tight[i];
    for (int64_t j = 0; j < k; ++j) {
      const double value = matrix(i, j);
      kept += value * w_[s_[j]], computed += value * fresh_weights[j];
    }
    if (!(std::abs(kept) <= kDrift && std::abs(computed) <= kDrift)) return true;
  }
  return false;
}

// Multipliers of the rows E.
void Walk::weigh(const double* tau) {
  const int64_t k = size();
  beside_.resize(k);
  for (int64_t i = 0; i < k; ++i) beside_[i] = tau[s_[i]] * sign_[s_[i]] - pull_[s_[i]];
  multipliers_.assign(k, 0.0);
  add_combination(multipliers_.data(), beside_.data(), k, k, [&](int64_t i) { return inverse_row(i); });
}

// Approximately steepest descending edge; false at a minimum.
bool Walk::find_edge(const double* tau, Edge* edge) {
  weigh(tau);
  price_columns(tau, edge);
  price_rows(edge);
  if (edge->place < 0) return edge->entering >= 0;
  const double sign = multipliers_[edge->place] < 0 ? 1.0 : -1.0;
  for (int64_t i = 0; i < size(); ++i) edge->direction[i] = sign * inverse_row(i)[edge->place];
  return true;
}

void Walk::price_columns(const double* tau, Edge* edge) {
  const int64_t k = size();
  gain_ = pull_;
  add_combination(gain_.data(), multipliers_.data(), k, m_, [&](int64_t i) { return edge_row(i); });
  Largest candidates;
  for (int64_t j = 0; j < m_; ++j) {
    if (!basic_[j]) candidates.offer(std::abs(gain_[j]) - tau[j] - 10 * kRate, j);
  }
  const int64_t count = candidates.count();
  std::vector<double> toward(count * k), entries(count * k);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t pick = 0; pick < count; ++pick) entries[pick * k + i] = edge_row(i)[candidates.place(pick)];
  }
  for (int64_t i = 0; i < k; ++i) {  // the inverse is large: traverse it once
    for (int64_t pick = 0; pick < count; ++pick) {
      toward[pick * k + i] = dot(inverse_row(i), entries.data() + pick * k, k);
    }
  }
  edge->direction.resize(k);
  double steepest = 0;
  for (int64_t pick = 0; pick < count; ++pick) {
    const double* way = toward.data() + pick * k;
    const double speed = candidates.value(pick) / std::sqrt(1 + dot(way, way, k));
    if (speed <= steepest) continue;
    steepest = speed;
    edge->entering = candidates.place(pick);
    edge->sign = sign_of(gain_[edge->entering]);
    edge->slope = -(candidates.value(pick) + 10 * kRate);
    for (int64_t i = 0; i < k; ++i) edge->direction[i] = -edge->sign * way[i];
  }
  edge->speed = steepest;
}

void Walk::price_rows(Edge* edge) {
  Largest candidates;
  for (int64_t i = 0; i < size(); ++i) {
    const double c = c_[e_[i]], over = std::max(-multipliers_[i], multipliers_[i] - c);
    if (over > kSlack * c) candidates.offer(over, i);
  }
  for (int64_t pick = 0; pick < candidates.count(); ++pick) {
    const int64_t place = candidates.place(pick);
    double square = 0;
    for (int64_t i = 0; i < size(); ++i) square += inverse_row(i)[place] * inverse_row(i)[place];
    const double speed = candidates.value(pick) / std::sqrt(square);
    if (speed <= edge->speed) continue;
    edge->speed = speed;
    edge->place = place, edge->entering = -1, edge->sign = 0;
    edge->slope = -candidates.value(pick);
  }
}

// Kinks of the slope along an edge: rows that reach the margin, coefficients that reach zero.
void Walk::find_kinks(const double* tau, const Edge& edge) {
  const int64_t k = size();
  rates_.assign(n_, 0.0);
  add_combination(rates_.data(), edge.direction.data(), k, n_, [&](int64_t i) { return column(s_[i]); });
  if (edge.entering >= 0) add_scaled(rates_.data(), edge.sign, column(edge.entering), n_);
  kinks_.clear();
  for (int64_t i = 0; i < n_; ++i) {
    const double moving = active_[i] ? rates_[i] : -rates_[i];
    if (moving > kRate && !tight_[i])
      kinks_.push_back({std::max(slack_[i] / rates_[i], 0.0), c_[i] * moving, i});
  }
  for (int64_t i = 0; i < k; ++i) {
    const double step = edge.direction[i], weight = tau[s_[i]];
    if (step * sign_[s_[i]] < -kRate && weight > 0) {
      kinks_.push_back({std::max(-w_[s_[i]] / step, 0.0), 2 * weight * std::abs(step), n_ + i});
    }
  }
}

void Walk::cross(int64_t row, double change) { crossed_.emplace_back(row, change); }

// Moves along an edge to its minimum and pivots; returns false if nothing stops it, which is rounding.
bool Walk::follow(const double* tau, const Edge& edge) {
  find_kinks(tau, edge);
  const auto later = [](const Kink& a, const Kink& b) {
    return a.time != b.time ? a.time > b.time : a.index > b.index;
  };
  std::make_heap(kinks_.begin(), kinks_.end(), later);
  double slope = edge.slope;
  auto end = kinks_.end();
  bool stopped = false;
  while (end != kinks_.begin() && !stopped) {
    std::pop_heap(kinks_.begin(), end--, later);
    slope += end->bend;
    stopped = slope >= kFlat * edge.slope;
  }
  if (!stopped) return false;
  const Kink stop = *end;
  crossed_.clear();
  // What was passed changes sides; from the heap's end, the first kink last.
  for (auto kink = kinks_.end() - 1; kink != end; --kink) {
    if (kink->index >= n_) {
      sign_[s_[kink->index - n_]] *= -1;
    } else {
      cross(kink->index, active_[kink->index] ? -c_[kink->index] : c_[kink->index]);
      active_[kink->index] ^= 1;
    }
  }
  const int64_t k = size();
  for (int64_t i = 0; i < k; ++i) w_[s_[i]] += stop.time * edge.direction[i];
  add_scaled(slack_.data(), -stop.time, rates_.data(), n_);
  for (int64_t i = 0; i < k; ++i) {
    if (i != edge.place) slack_[e_[i]] = 0;
  }
  if (stop.index < n_) {
    if (active_[stop.index]) cross(stop.index, -c_[stop.index]);
    active_[stop.index] = 0;
  }
  if (edge.place >= 0 && multipliers_[edge.place] > 0) {
    const int64_t left = e_[edge.place];
    active_[left] = 1;
    cross(left, c_[left]);
  }
  if (edge.entering >= 0) w_[edge.entering] = stop.time * edge.sign, sign_[edge.entering] = edge.sign;
  if (!crossed_.empty()) {
    for (int64_t j = 0; j < m_; ++j) {
      const double* values = column(j);
      double change = 0;
      for (const auto& [row, weight] : crossed_) change += weight * values[row];
      pull_[j] += change;
    }
  }
  if (stop.index < n_) {
    enter_row(stop.index, edge);
  } else {
    leave_coefficient(stop.index - n_, edge);
  }
  return true;
}

void Walk::enter_row(int64_t row, const Edge& edge) {
  const int64_t k = size();
  std::vector<double> basic(k);
  for (int64_t i = 0; i < k; ++i) basic[i] = column(s_[i])[row];
  beside_.assign(k, 0.0);
  add_combination(beside_.data(), basic.data(), k, k, [&](int64_t i) { return inverse_row(i); });
  int64_t place = edge.place;
  if (edge.entering < 0) {
    const double pivot = beside_[place];
    beside_[place] -= 1;
    for (int64_t i = 0; i < k; ++i) {
      add_scaled(inverse_row(i), -inverse_row(i)[place] / pivot, beside_.data(), k);
    }
    tight_[e_[place]] = 0;
  } else {
    // direction is -sign times the inverse times the entering column
    have_room(k + 1);
    double corner = column(edge.entering)[row];
    for (int64_t i = 0; i < k; ++i) corner += edge.sign * basic[i] * edge.direction[i];
    for (int64_t i = 0; i < k; ++i) {
      const double toward = -edge.sign * edge.direction[i];
      add_scaled(inverse_row(i), toward / corner, beside_.data(), k);
      inverse_row(i)[k] = -toward / corner;
      inverse_row(k)[i] = -beside_[i] / corner;
    }
    inverse_row(k)[k] = 1 / corner;
    place = k;
    s_.push_back(edge.entering), e_.push_back(row);
    basic_[edge.entering] = 1;
  }
  e_[place] = row;
  tight_[row] = 1;
  double* values = edge_rows_.data() + place * width_;
  for (int64_t j = 0; j < m_; ++j) values[j] = column(j)[row];
  slack_[row] = 0;
}

void Walk::leave_coefficient(int64_t index, const Edge& edge) {
  const int64_t k = size(), gone = s_[index];
  if (edge.entering >= 0) {
    const double pivot = -edge.sign * edge.direction[index];
    beside_.assign(inverse_row(index), inverse_row(index) + k);
    for (int64_t i = 0; i < k; ++i) {
      const double toward = -edge.sign * edge.direction[i] - (i == index ? 1.0 : 0.0);
      add_scaled(inverse_row(i), -toward / pivot, beside_.data(), k);
    }
    s_[index] = edge.entering;
    basic_[edge.entering] = 1;
  } else {
    const int64_t place = edge.place, last = k - 1;
    beside_.assign(inverse_row(index), inverse_row(index) + k);
    const double pivot = beside_[place];
    for (int64_t i = 0; i < k; ++i) {
      add_scaled(inverse_row(i), -inverse_row(i)[place] / pivot, beside_.data(), k);
    }
    // The last coefficient and the last row take the positions of those that left.
    std::copy_n(inverse_row(last), k, inverse_row(index));
    for (int64_t i = 0; i < k; ++i) inverse_row(i)[place] = inverse_row(i)[last];
    tight_[e_[place]] = 0;
    s_[index] = s_[last], e_[place] = e_[last];
    std::copy_n(edge_row(last), m_, edge_rows_.data() + place * width_);
    s_.pop_back(), e_.pop_back();
  }
  basic_[gone] = 0;
  w_[gone] = sign_[gone] = 0;
}

}  // namespace oases::svm
