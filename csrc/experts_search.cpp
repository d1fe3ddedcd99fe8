#include <algorithm>
#include <cmath>
#include <numeric>

#include "experts.h"

namespace oases::experts {

namespace {

constexpr double kNothing = 1e-12;
// How far above the mean a device may stay, as shares of how far the busiest is.
constexpr double kLevels[] = {0.01, 0.05, 0.15, 0.3, 0.5, 0.75};
// The least share of a level for which a copy is made.
constexpr double kWorthwhile = 0.01;
// Copies in vain until a search gives up; how much slower than the best one may be whose routes are improved, and
// for how many sweeps.
constexpr int kPatience = 8;
constexpr double kNear = 1.15;
constexpr int kSweeps = 4;

using Weights = std::vector<std::pair<int64_t, int64_t>>;  // (tokens, expert)

void heaviest_first(Weights& weights) {
  std::stable_sort(weights.begin(), weights.end(), [](auto& a, auto& b) { return a.first > b.first; });
}

// Tokens go from the busiest devices to others that hold their expert. The largest load is taken as a norm of all,
// so that it falls, too, where several devices are the busiest.
class Routes {
 public:
  explicit Routes(Layer& layer)
      : layer_(layer),
        devices_(layer.devices()),
        computed_(devices_),
        sent_(devices_),
        received_(devices_) {
    for (int64_t device = 0; device < devices_; ++device) note(device);
    weigh();
  }

  void improve() {
    for (int sweep = 0; sweep < kSweeps; ++sweep)
      if (!once()) break;
  }

 private:
  static double power(double tokens) {
    const double second = tokens * tokens, fourth = second * second, eighth = fourth * fourth;
    return eighth * eighth;
  }

  void note(int64_t device) {
    all_computed_ -= computed_[device];
    all_wire_ -= sent_[device] + received_[device];
    computed_[device] = power(layer_.tokens()[device]);
    sent_[device] = power(layer_.sent()[device]);
    received_[device] = power(layer_.received()[device]);
    all_computed_ += computed_[device];
    all_wire_ += sent_[device] + received_[device];
  }

  // What one more unit of the sums of powers costs: the slope of their 16th root.
  void weigh() {
    const auto slope = [](double sum) { return sum > 0 ? std::sqrt(std::sqrt(std::sqrt(std::sqrt(sum)))) / sum : 0; };
    per_computed_ = layer_.compute_seconds() * slope(all_computed_);
    per_wire_ = layer_.wire_seconds() * slope(all_wire_);
  }

  bool hot(int64_t device) const {
    return computed_[device] > hot_computed_ || received_[device] > hot_wire_;
  }

  bool once() {
    const double share = power(0.97);
    hot_computed_ = share * *std::max_element(computed_.begin(), computed_.end());
    hot_wire_ = share * std::max(*std::max_element(sent_.begin(), sent_.end()),
                                 *std::max_element(received_.begin(), received_.end()));
    bool any = false;
    for (int64_t expert = 0; expert < layer_.experts(); ++expert) {
      if (!layer_.number(expert)) continue;
      auto holders = layer_.holders(expert);
      holders.push_back(static_cast<int32_t>(layer_.home(expert)));
      for (int64_t from = 0; from < devices_; ++from) {
        const int64_t now = layer_.route(expert, from);
        if (!layer_.count(expert, from) || !(hot(now) || (now != from && sent_[from] > hot_wire_))) continue;
        if (move(expert, from, now, holders)) any = true;
      }
    }
    return any;
  }

  bool move(int64_t expert, int64_t from, int64_t now, const std::vector<int32_t>& holders) {
    const double tokens = static_cast<double>(layer_.count(expert, from));
    const auto wire = [&](int64_t to, double sign) {
      if (to == from) return 0.0;
      return power(layer_.received()[to] + sign * tokens) - received_[to];
    };
    const double away = per_computed_ * (power(layer_.tokens()[now] - tokens) - computed_[now]) +
                        per_wire_ * wire(now, -1);
    double least = -1e-9 * (layer_.compute_seconds() + layer_.wire_seconds());
    int64_t chosen = -1;
    for (const int32_t to : holders) {
      if (to == now) continue;
      double change = away + per_computed_ * (power(layer_.tokens()[to] + tokens) - computed_[to]) +
                      per_wire_ * wire(to, 1);
      if (now == from) change += per_wire_ * (power(layer_.sent()[from] + tokens) - sent_[from]);
      if (to == from) change += per_wire_ * (power(layer_.sent()[from] - tokens) - sent_[from]);
      if (change < least) least = change, chosen = to;
    }
    if (chosen < 0) return false;
    layer_.send(expert, from, chosen);
    for (const int64_t device : {from, now, chosen}) note(device);
    weigh();
    return true;
  }

  Layer& layer_;
  int64_t devices_;
  std::vector<double> computed_, sent_, received_;  // by device, to the 16th power
  double all_computed_ = 0, all_wire_ = 0, per_computed_ = 0, per_wire_ = 0, hot_computed_ = 0, hot_wire_ = 0;
};

class Search {
 public:
  Search(const Layer& nothing_copied, int64_t slots)
      : experts_(nothing_copied.experts()),
        devices_(nothing_copied.devices()),
        slots_(slots),
        best_(nothing_copied),
        seconds_(best_.seconds()),
        sources_(experts_) {}

  Layer run() {
    if (devices_ == 1 || slots_ < 1) return best_;
    const Layer start = best_;
    replicate(start);
    shadow(start);
    const int64_t most = std::min(slots_, experts_);
    for (int64_t each = 1; each < most && each <= 4; each *= 2) relieve_all(start, each);
    relieve_all(start, most);
    prune();
    return best_;
  }

 private:
  // The paper's loop: relieve the busiest device until it is as the others, and keep the best on the way. each:
  // copies that a device may hold, for what they cost is what the device with most of them takes.
  void relieve_all(Layer layer, int64_t each) {
    double least = layer.seconds();
    int in_vain = 0;
    for (const double share : kLevels) {
      while (true) {
        double sum = 0, most = 0;
        int64_t busiest = 0;
        for (int64_t device = 0; device < devices_; ++device) {
          const double busy = layer.busy(device);
          sum += busy;
          if (busy > most) most = busy, busiest = device;
        }
        const double mean = sum / static_cast<double>(devices_), level = mean + share * (most - mean);
        if (most <= level * (1 + kNothing) || !relieve(layer, busiest, level, each)) break;
        const double now = keep(layer);
        in_vain = now < least ? 0 : in_vain + 1;
        least = std::min(least, now);
        if (in_vain > kPatience) return;
      }
    }
    finish(layer);
  }

  // One more copy of one of the device's experts, the heaviest that can be.
  bool relieve(Layer& layer, int64_t device, double level, int64_t each) {
    const int64_t mine = experts_ / devices_;
    Weights weights;
    for (int64_t expert = device * mine; expert < (device + 1) * mine; ++expert)
      if (const int64_t tokens = layer.at(expert, device)) weights.emplace_back(tokens, expert);
    heaviest_first(weights);
    for (const auto& [tokens, expert] : weights)
      if (relieve_of(layer, expert, tokens, device, level, each)) return true;
    return false;
  }

  // A copy where it takes most off the device. Its own tokens a device need not receive.
  bool relieve_of(Layer& layer, int64_t expert, int64_t tokens, int64_t device, double level, int64_t each) {
    const double compute = layer.compute_seconds(), wire = layer.wire_seconds();
    const int64_t mine = layer.route(expert, device) == device ? layer.count(expert, device) : 0;
    const double all = static_cast<double>(tokens - mine);
    int64_t chosen = -1;
    double most = kWorthwhile * level;
    for (int64_t to = 0; to < devices_; ++to) {
      const double room = level - layer.busy(to);
      if (room <= 0 || layer.copies(to) >= each || to == device || layer.holds(to, expert))
        continue;
      const double its =
          layer.route(expert, to) == device ? static_cast<double>(layer.count(expert, to)) : 0;
      if (its * compute > room) continue;
      const double fits = its + (room - its * compute) / (compute + wire + kNothing);
      const double relief = std::min(fits, all) * (compute + wire) + its * wire;
      if (relief > most) most = relief, chosen = to;
    }
    if (chosen < 0) return false;
    layer.copy(expert, chosen);
    if (layer.route(expert, chosen) == device) layer.send(expert, chosen, chosen);
    for (const auto& [number, from] : sources(layer, expert)) {
      if (from == device || layer.route(expert, from) != device) continue;
      if (layer.busy(device) <= level || !number) break;
      if (layer.busy(chosen) + static_cast<double>(number) * (compute + wire) <= level)
        layer.send(expert, from, chosen);
    }
    return true;
  }

  // The heaviest experts to all devices, as many as pay; then what is left uneven is relieved.
  void shadow(const Layer& start) {
    Weights weights = loads(start);
    Layer layer = start;
    double before = start.seconds();
    int in_vain = 0;
    std::vector<Layer> further;
    for (int64_t number = 0; number < std::min(slots_, experts_); ++number) {
      layer.shadow(weights[number].second);
      keep(layer);
      const double now = layer.seconds();
      if (now >= before && ++in_vain == 3) break;
      if (now < before) further.push_back(layer), before = now;
    }
    for (const size_t back : {size_t{1}, further.size() / 2 + 1})
      if (back <= further.size()) relieve_all(further[further.size() - back], slots_);
  }

  // As EPLB does: see oases/moe/eplb.py, which this follows to the last tie.
  void replicate(const Layer& start) {
    const int64_t mine = experts_ / devices_, slots = std::min(slots_, mine);
    std::vector<double> total(experts_), share(experts_), weight(devices_);
    std::vector<int64_t> number(experts_, 1), left(devices_, slots), order(experts_);
    for (const auto& [tokens, expert] : loads(start)) total[expert] = static_cast<double>(tokens);
    share = total;
    for (int64_t more = 0; more < slots * devices_; ++more) {
      const int64_t busiest = std::max_element(share.begin(), share.end()) - share.begin();
      if (share[busiest] <= 0) break;
      ++number[busiest];
      share[busiest] =
          number[busiest] < devices_ ? total[busiest] / static_cast<double>(number[busiest]) : 0;
    }
    for (int64_t expert = 0; expert < experts_; ++expert) {
      share[expert] = total[expert] / static_cast<double>(number[expert]);
      weight[start.home(expert)] += share[expert];
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return share[a] > share[b]; });
    Layer layer = start;
    for (const int64_t expert : order)
      if (number[expert] > 1) spread(layer, expert, number[expert] - 1, share[expert], weight, left);
    keep(layer);
    finish(layer);
  }

  void spread(Layer& layer, int64_t expert, int64_t copies, double share, std::vector<double>& weight,
              std::vector<int64_t>& left) {
    std::vector<int64_t> holders{layer.home(expert)};
    for (int64_t more = 0; more < copies; ++more) {
      int64_t lightest = -1;
      for (int64_t device = 0; device < devices_; ++device)
        if (left[device] && device != layer.home(expert) && !layer.holds(device, expert) &&
            (lightest < 0 || weight[device] < weight[lightest]))
          lightest = device;
      if (lightest < 0) break;
      layer.copy(expert, lightest);
      holders.push_back(lightest);
      weight[lightest] += share;
      --left[lightest];
    }
    std::vector<int64_t> tokens;
    for (const int64_t device : holders) tokens.push_back(layer.count(expert, device));
    for (const auto& [count, device] : sources(layer, expert)) {
      if (device == holders.front()) continue;
      if (layer.holds(device, expert)) {
        layer.send(expert, device, device);
        continue;
      }
      const size_t least = std::min_element(tokens.begin(), tokens.end()) - tokens.begin();
      layer.send(expert, device, holders[least]);
      tokens[least] += count;
    }
  }

  // (tokens, device) of an expert, the most first.
  const Weights& sources(const Layer& layer, int64_t expert) {
    Weights& found = sources_[expert];
    if (found.empty()) {
      for (int64_t device = 0; device < devices_; ++device)
        found.emplace_back(layer.count(expert, device), device);
      heaviest_first(found);
    }
    return found;
  }

  Weights loads(const Layer& start) const {
    Weights weights;
    for (int64_t expert = 0; expert < experts_; ++expert)
      weights.emplace_back(start.at(expert, start.home(expert)), expert);
    heaviest_first(weights);
    return weights;
  }

  void finish(Layer& layer) {
    if (layer.seconds() > kNear * seconds_) return;
    Routes(layer).improve();
    keep(layer);
  }

  // Take copies away that save nothing.
  void prune() {
    Layer layer = best_;
    finish(layer);
    for (int64_t expert = 0; expert < experts_; ++expert)
      for (const int32_t device : best_.holders(expert)) {
        if (best_.at(expert, device)) continue;
        best_.drop(expert, device);
      }
    seconds_ = best_.seconds();
  }

  double keep(const Layer& layer) {
    const double seconds = layer.seconds();
    if (seconds < seconds_) best_ = layer, seconds_ = seconds;
    return seconds;
  }

  int64_t experts_, devices_, slots_;
  Layer best_;
  double seconds_;
  std::vector<Weights> sources_;
};

}  // namespace

Layer search(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs, int64_t slots) {
  return Search(Layer(counts, experts, devices, costs), slots).run();
}

}  // namespace oases::experts
