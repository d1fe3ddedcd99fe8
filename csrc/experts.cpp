#include "experts.h"

#include <algorithm>
#include <cmath>

namespace oases::experts {

namespace {

// Maximum of values of at least 0. Four at a time, because a search calls it thousands of times.
double largest(const std::vector<double>& values) {
  double found[4] = {0, 0, 0, 0};
  const size_t whole = values.size() / 4 * 4;
  for (size_t at = 0; at < whole; at += 4)
    for (size_t lane = 0; lane < 4; ++lane)
      found[lane] = found[lane] < values[at + lane] ? values[at + lane] : found[lane];
  for (size_t at = whole; at < values.size(); ++at) found[0] = std::max(found[0], values[at]);
  return std::max(std::max(found[0], found[1]), std::max(found[2], found[3]));
}

}  // namespace

Layer::Layer(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs)
    : experts_(experts),
      devices_(devices),
      nodes_(costs.devices_per_node ? devices / costs.devices_per_node : 1),
      costs_(costs),
      compute_((1 + costs.backward) * costs.token_seconds),
      wire_(4 * costs.token_bytes / costs.bandwidth),
      counts_(counts),
      routes_(experts * devices),
      copied_(experts * devices),
      number_(experts),
      held_(devices) {
  for (auto* row : {&tokens_, &sent_, &received_, &out_, &in_, &exchanged_}) row->assign(devices, 0);
  for (auto* row : {&tokens_out_, &tokens_in_, &experts_out_, &experts_in_}) row->assign(nodes_, 0);
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t to = owner(expert);
    std::fill_n(routes_.begin() + expert * devices, devices, static_cast<int32_t>(to));
    double all = 0;
    for (int64_t device = 0; device < devices; ++device) {
      const double tokens = static_cast<double>(count(expert, device));
      all += tokens;
      sent_[device] += tokens;
      if (node(device) == node(to)) continue;
      tokens_out_[node(device)] += tokens;
      tokens_in_[node(to)] += tokens;
    }
    const double own = static_cast<double>(count(expert, to));
    sent_[to] -= own;
    tokens_[to] += all;
    received_[to] += all - own;
  }
}

std::vector<int32_t> Layer::holders(int64_t expert) const {
  std::vector<int32_t> found;
  if (!number(expert)) return found;
  for (int64_t device = 0; device < devices_; ++device)
    if (holds(device, expert)) found.push_back(static_cast<int32_t>(device));
  return found;
}

int64_t Layer::at(int64_t expert, int64_t device) const {
  const int64_t* counts = counts_ + expert * devices_;
  const int32_t* routes = routes_.data() + expert * devices_;
  int64_t found = 0;
  for (int64_t from = 0; from < devices_; ++from) found += routes[from] == device ? counts[from] : 0;
  return found;
}

void Layer::send(int64_t expert, int64_t device, int64_t by) {
  const int64_t before = route(expert, device);
  const double tokens = static_cast<double>(count(expert, device));
  routes_[expert * devices_ + device] = static_cast<int32_t>(by);
  if (before == by || tokens == 0) return;
  tokens_[before] -= tokens;
  tokens_[by] += tokens;
  const auto travel = [&](int64_t to, double sign) {
    if (to == device) return;
    sent_[device] += sign * tokens;
    received_[to] += sign * tokens;
    if (node(to) == node(device)) return;
    tokens_out_[node(device)] += sign * tokens;
    tokens_in_[node(to)] += sign * tokens;
  };
  travel(before, -1);
  travel(by, 1);
}

void Layer::copy(int64_t expert, int64_t device) {
  carry(expert, -1);
  copied_[expert * devices_ + device] = 1;
  ++number_[expert];
  ++held_[device];
  carry(expert, 1);
}

void Layer::drop(int64_t expert, int64_t device) {
  carry(expert, -1);
  copied_[expert * devices_ + device] = 0;
  --number_[expert];
  --held_[device];
  carry(expert, 1);
}

void Layer::shadow(int64_t expert) {
  carry(expert, -1);
  for (int64_t device = 0; device < devices_; ++device) {
    if (device == owner(expert) || holds(device, expert)) continue;
    copied_[expert * devices_ + device] = 1;
    ++number_[expert];
    ++held_[device];
  }
  carry(expert, 1);
  for (int64_t device = 0; device < devices_; ++device) send(expert, device, device);
}

// Parameters to replicas: a shard to each from the owner, then each rank's shard to all the others.
void Layer::carry(int64_t expert, double sign) {
  if (!number(expert)) return;
  const double number = static_cast<double>(number_[expert]);
  const uint8_t* held = copied_.data() + expert * devices_;
  out_[owner(expert)] += sign;
  for (int64_t device = 0; device < devices_; ++device) {
    if (!held[device]) continue;
    in_[device] += sign / number;
    exchanged_[device] += sign * (number - 1) / number;
  }
  if (nodes_ == 1) return;
  const int64_t size = devices_ / nodes_;
  for (int64_t at = 0; at < nodes_; ++at) {
    const double here = static_cast<double>(std::count(held + at * size, held + (at + 1) * size, 1));
    const double exchanged = here * (number - here) / number;
    experts_out_[at] += sign * exchanged;
    experts_in_[at] += sign * exchanged;
    if (at == node(owner(expert))) continue;
    experts_in_[at] += sign * here / number;
    experts_out_[node(owner(expert))] += sign * here / number;
  }
}

double Layer::moving() const {
  const auto [first, second] = rounds();
  return first + second;
}

double Layer::on_the_wire(const std::vector<double>& sent, const std::vector<double>& received) const {
  const double alone = std::max(largest(sent), largest(received)) / costs_.bandwidth;
  if (costs_.both_ways == 0) return alone;
  double most = 0;
  for (int64_t device = 0; device < devices_; ++device)
    most = std::max(most, sent[device] + received[device]);
  return std::max(alone, most / costs_.both_ways);
}

std::pair<double, double> Layer::rounds() const {
  const int64_t most = *std::max_element(held_.begin(), held_.end());
  if (costs_.mean_transfer) {
    double all = 0;
    for (const int32_t held : held_) all += held;
    return {costs_.expert_bytes * all / (static_cast<double>(devices_) * costs_.bandwidth), 0};
  }
  if (!most) return {0, 0};
  double first = on_the_wire(out_, in_), second = on_the_wire(exchanged_, exchanged_);
  if (nodes_ > 1) {
    // Inter-node traffic exists in both rounds; each gets its share of the longer time.
    const double across = std::max(largest(experts_out_), largest(experts_in_)) / costs_.node_bandwidth;
    const double longer = std::max(1.0, across / (first + second));
    first *= longer, second *= longer;
  }
  return {costs_.expert_bytes * first + costs_.latency, costs_.expert_bytes * second + costs_.latency};
}

double Layer::handling() const {
  if (costs_.handling_seconds == 0 || costs_.mean_transfer) return 0;
  double most = 0;
  for (int64_t device = 0; device < devices_; ++device)
    most = std::max(most, out_[device] + static_cast<double>(held_[device]));
  return costs_.handling_seconds * most;
}

double Layer::seconds() const {
  double tokens = on_the_wire(sent_, received_);
  if (nodes_ > 1)
    tokens = std::max(tokens, std::max(largest(tokens_out_), largest(tokens_in_)) / costs_.node_bandwidth);
  // Two of four all-to-alls are in the forward pass.
  return costs_.fixed_seconds + 4 * (costs_.token_bytes * tokens + costs_.latency) +
         compute_ * largest(tokens_) + exposed();
}

double Layer::hidden() const {
  double all = 0;
  for (const double tokens : tokens_) all += tokens;
  return costs_.scheduled
             ? costs_.token_seconds * all / static_cast<double>(devices_) + costs_.non_expert_seconds
             : 0;
}

double Layer::exposed() const {
  const auto [first, second] = rounds();  // Agg in the backward pass takes as long as Trans
  if (!costs_.scheduled) return handling() + 2 * (first + second);
  const double experts = costs_.token_seconds * largest(tokens_), others = costs_.non_expert_seconds;
  const auto left = [](double seconds, double under) { return std::max(0.0, seconds - under); };
  if (costs_.mean_transfer)
    return left(first, experts + others) + left(first, costs_.backward * (experts + others));
  // The first round, and the last of Agg, run under non-expert compute, the others under the experts. Before
  // a stack's first experts only what hides the first round runs, after the last ones nothing.
  if (costs_.leading)
    return handling() + left(first, others) + second + left(second, costs_.backward * others) + first;
  return handling() + left(first, others) + left(second, experts) + left(second, costs_.backward * experts) +
         left(first, costs_.backward * others);
}

}  // namespace oases::experts
