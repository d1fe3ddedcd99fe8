#include "experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace oases::experts {

namespace {

double largest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

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
      holders_(experts) {
  for (auto* row : {&tokens_, &sent_, &received_, &out_, &in_, &exchanged_, &held_}) row->assign(devices, 0);
  for (auto* row : {&tokens_out_, &tokens_in_, &experts_out_, &experts_in_}) row->assign(nodes_, 0);
  for (int64_t expert = 0; expert < experts; ++expert)
    for (int64_t device = 0; device < devices; ++device) {
      routes_[expert * devices + device] = static_cast<int32_t>(device);
      tokens_[device] += static_cast<double>(count(expert, device));
      send(expert, device, home(expert));
    }
}

bool Layer::holds(int64_t device, int64_t expert) const {
  const auto& held = holders_[expert];
  return std::find(held.begin(), held.end(), device) != held.end();
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
  holders_[expert].push_back(static_cast<int32_t>(device));
  carry(expert, 1);
}

void Layer::drop(int64_t expert, int64_t device) {
  carry(expert, -1);
  auto& held = holders_[expert];
  held.erase(std::find(held.begin(), held.end(), device));
  carry(expert, 1);
}

// Parameters to the holders: a share to each from home, then each holder's share to all the others.
void Layer::carry(int64_t expert, double sign) {
  const auto& held = holders_[expert];
  if (held.empty()) return;
  const double number = static_cast<double>(held.size());
  out_[home(expert)] += sign;
  for (const int32_t device : held) {
    in_[device] += sign / number;
    exchanged_[device] += sign * (number - 1) / number;
    held_[device] += sign;
  }
  if (nodes_ == 1) return;
  std::vector<double> here(nodes_, 0);
  for (const int32_t device : held) here[node(device)] += 1;
  for (int64_t at = 0; at < nodes_; ++at) {
    const double exchanged = here[at] * (number - here[at]) / number;
    experts_out_[at] += sign * exchanged;
    experts_in_[at] += sign * exchanged;
    if (at == node(home(expert))) continue;
    experts_in_[at] += sign * here[at] / number;
    experts_out_[node(home(expert))] += sign * here[at] / number;
  }
}

double Layer::moving() const {
  if (costs_.mean_transfer)
    return costs_.expert_bytes * std::accumulate(held_.begin(), held_.end(), 0.0) /
           (static_cast<double>(devices_) * costs_.bandwidth);
  if (largest(held_) < 0.5) return 0;
  double experts = (std::max(largest(out_), largest(in_)) + largest(exchanged_)) / costs_.bandwidth;
  if (nodes_ > 1)
    experts =
        std::max(experts, std::max(largest(experts_out_), largest(experts_in_)) / costs_.node_bandwidth);
  return costs_.expert_bytes * experts + 2 * costs_.latency;
}

double Layer::seconds() const {
  double tokens = std::max(largest(sent_), largest(received_)) / costs_.bandwidth;
  if (nodes_ > 1)
    tokens = std::max(tokens, std::max(largest(tokens_out_), largest(tokens_in_)) / costs_.node_bandwidth);
  const double forward = costs_.token_seconds * largest(tokens_);
  // Of four all-to-alls two are in the forward pass. Agg, in the backward pass, takes as long as Trans.
  const double total = 4 * (costs_.token_bytes * tokens + costs_.latency) + (1 + costs_.backward) * forward;
  if (!costs_.scheduled) return total + 2 * moving();
  const double under = forward + costs_.non_expert_seconds;
  return total + std::max(0.0, moving() - under) + std::max(0.0, moving() - costs_.backward * under);
}

}  // namespace oases::experts
