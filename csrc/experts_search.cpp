#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "experts_refinement.h"

namespace oases::experts {

namespace {

constexpr double kNothing = 1e-12;
// How far above the mean a device may stay, as fractions of the busiest device's excess.
constexpr double kLevels[] = {0.01, 0.05, 0.15, 0.3, 0.5, 0.75};
// Unsuccessful replicas until a pass stops, and the maximum slowdown over the best of a
// placement that is refined.
constexpr int kPatience = 8;
constexpr double kNear = 1.15;
// Search budget in devices examined, plus a term per device, and the share for the start of a refinement.
// Small cases leave much of it for perturbed placements.
constexpr int64_t kAllWork = 20000, kFurtherWork = 1200000, kStart = 500;
// Maximum slowdown over the best of a placement that is perturbed next, initially.
constexpr double kWorse = 0.01;
// Number of placements that are refined.
constexpr size_t kRefined = 3;
// Maximum transfer time, in transfers of one expert.
constexpr double kUnderWay[] = {1, 1.5, 2, 3, 4.5};

using Weights = std::vector<std::pair<int64_t, int64_t>>;  // (tokens, expert)

void heaviest_first(Weights& weights) {
  std::stable_sort(weights.begin(), weights.end(), [](auto& a, auto& b) { return a.first > b.first; });
}

class Search {
 public:
  Search(const Layer& nothing_copied, int64_t slots)
      : experts_(nothing_copied.experts()),
        devices_(nothing_copied.devices()),
        slots_(slots),
        best_(nothing_copied),
        seconds_(best_.seconds()),
        work_(static_cast<int64_t>(kAllWork + kFurtherWork / static_cast<double>(devices_))),
        sources_(experts_) {}

  Layer run(bool eplb) {
    if (devices_ == 1 || slots_ < 1) return best_;
    const Layer start = best_;
    Layer replicas = replicated(start);
    if (eplb) return replicas;
    keep(replicas);
    finish(replicas);
    shadow(start);
    // Transfers may take as long as they are hidden, or longer.
    Layer one = start;
    one.copy(0, devices_ - 1);
    const double unit = one.moving();
    const double hidden = start.hidden();
    relieve_all(start, hidden);
    for (const double times : kUnderWay)
      if (times * unit > hidden) relieve_all(start, times * unit);
    relieve_all(start, std::numeric_limits<double>::infinity());
    refine();
    disturb();
    prune();
    return best_;
  }

 private:
  // The paper's loop: relieve the busiest device until it is like the others, and keep the best placement
  // seen. longest: maximum seconds of transfers.
  void relieve_all(Layer layer, double longest) {
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
        if (most <= level * (1 + kNothing) || !relieve(layer, busiest, level, longest)) break;
        const double now = keep(layer);
        in_vain = now < least ? 0 : in_vain + 1;
        least = std::min(least, now);
        work_ -= 4 * devices_;
        if (in_vain > kPatience) return;
      }
    }
    finish(layer);
  }

  // Adds a replica of one of the device's experts, the heaviest possible.
  bool relieve(Layer& layer, int64_t device, double level, double longest) {
    const int64_t mine = experts_ / devices_;
    Weights weights;
    for (int64_t expert = device * mine; expert < (device + 1) * mine; ++expert)
      if (const int64_t tokens = layer.at(expert, device)) weights.emplace_back(tokens, expert);
    heaviest_first(weights);
    for (const auto& [tokens, expert] : weights)
      if (relieve_of(layer, expert, tokens, device, level, longest)) return true;
    return false;
  }

  // Adds a replica where it relieves the device most. A device need not receive its own tokens.
  bool relieve_of(Layer& layer, int64_t expert, int64_t tokens, int64_t device, double level,
                  double longest) {
    const double compute = layer.compute_seconds(), wire = layer.wire_seconds();
    const int64_t mine = layer.route(expert, device) == device ? layer.count(expert, device) : 0;
    const double all = static_cast<double>(tokens - mine);
    int64_t chosen = -1;
    double most = kWorthwhile * level;
    for (int64_t to = 0; to < devices_; ++to) {
      const double room = level - layer.busy(to);
      if (room <= 0 || layer.copies(to) >= slots_ || to == device || layer.holds(to, expert)) continue;
      const double its = layer.route(expert, to) == device ? static_cast<double>(layer.count(expert, to)) : 0;
      if (its * compute > room) continue;
      const double fits = its + (room - its * compute) / (compute + wire + kNothing);
      const double relief = std::min(fits, all) * (compute + wire) + its * wire;
      if (relief > most) most = relief, chosen = to;
    }
    if (chosen < 0) return false;
    layer.copy(expert, chosen);
    if (layer.moving() > longest) {
      layer.drop(expert, chosen);
      return false;
    }
    if (layer.route(expert, chosen) == device) layer.send(expert, chosen, chosen);
    for (const auto& [number, from] : sources(layer, expert)) {
      if (from == device || layer.route(expert, from) != device) continue;
      if (layer.busy(device) <= level || !number) break;
      if (layer.busy(chosen) + static_cast<double>(number) * (compute + wire) <= level)
        layer.send(expert, from, chosen);
    }
    return true;
  }

  // Replicates the heaviest experts on all devices, as many as pay; then relieves what is still uneven.
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
      if (back <= further.size())
        relieve_all(further[further.size() - back], std::numeric_limits<double>::infinity());
  }

  // EPLB's placement: the busiest expert gets one more replica, then replicas are packed, the heaviest first,
  // each on the lightest device with a free slot. An owner keeps its experts, whose optimizer state it has.
  Layer replicated(const Layer& start) {
    const int64_t mine = experts_ / devices_, slots = std::min(slots_, mine);
    std::vector<double> total(experts_), share(experts_), weight(devices_);
    std::vector<int64_t> number(experts_, 1), left(devices_, slots), order(experts_);
    for (const auto& [tokens, expert] : loads(start)) total[expert] = static_cast<double>(tokens);
    share = total;
    for (int64_t more = 0; more < slots * devices_; ++more) {
      const int64_t busiest = std::max_element(share.begin(), share.end()) - share.begin();
      if (share[busiest] <= 0) break;
      ++number[busiest];
      share[busiest] = number[busiest] < devices_ ? total[busiest] / static_cast<double>(number[busiest]) : 0;
    }
    for (int64_t expert = 0; expert < experts_; ++expert) {
      share[expert] = total[expert] / static_cast<double>(number[expert]);
      weight[start.owner(expert)] += share[expert];
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return share[a] > share[b]; });
    Layer layer = start;
    for (const int64_t expert : order)
      if (number[expert] > 1) spread(layer, expert, number[expert] - 1, share[expert], weight, left);
    return layer;
  }

  void spread(Layer& layer, int64_t expert, int64_t copies, double share, std::vector<double>& weight,
              std::vector<int64_t>& left) {
    std::vector<int64_t> holders{layer.owner(expert)};
    for (int64_t more = 0; more < copies; ++more) {
      int64_t lightest = -1;
      for (int64_t device = 0; device < devices_; ++device)
        if (left[device] && device != layer.owner(expert) && !layer.holds(device, expert) &&
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

  // (tokens, device) of an expert, sorted descending.
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
      weights.emplace_back(start.at(expert, start.owner(expert)), expert);
    heaviest_first(weights);
    return weights;
  }

  // Adds a candidate placement.
  void finish(Layer& layer) {
    const double seconds = layer.seconds();
    if (work_ <= 0 || seconds > kNear * seconds_) return;
    work_ -= Refinement<4>(layer, 0).improve();
    ends_.emplace_back(keep(layer), layer);
  }

  double refine(Layer& layer) {
    work_ -= Refinement<4>(layer, slots_).improve();
    work_ -= Refinement<6>(layer, slots_).improve();
    return keep(layer);
  }

  // Refines the best placements, with further replicas.
  void refine() {
    std::stable_sort(ends_.begin(), ends_.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (size_t end = 0; end < std::min(kRefined, ends_.size()) && work_ > 0; ++end)
      refine(ends_[end].second);
  }

  // Perturbs replicas and routes of the best placement and refines the result: small cases, in which a single
  // route matters, have time for it. Random numbers are equal on every rank.
  void disturb() {
    const int64_t mine = experts_ / devices_;
    uint64_t state = 1;
    const auto below = [&](int64_t limit) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(limit));
    };
    const double all = static_cast<double>(work_);
    Layer current = best_, layer = best_;
    while ((work_ -= experts_ * devices_ + kStart) > 0) {
      layer = current;
      const int64_t freed = take(layer, below(experts_ * devices_));
      if (below(2)) take(layer, below(experts_ * devices_));
      const int64_t expert = below(experts_);
      const bool anywhere = freed < 0 || !below(4);
      const int64_t given = anywhere ? expert : busiest(layer) * mine + below(mine);
      const int64_t to = anywhere ? below(devices_) : freed;
      if (below(2) && layer.copies(to) < slots_ && layer.owner(given) != to && !layer.holds(to, given)) {
        layer.copy(given, to);
        layer.send(given, to, to);
      }
      const auto holders = layer.holders(expert);
      if (!holders.empty())
        layer.send(expert, below(devices_), holders[below(static_cast<int64_t>(holders.size()))]);
      if (refine(layer) <= seconds_ * (1 + kWorse * static_cast<double>(work_) / all)) current = layer;
    }
  }

  // Removes a replica, the next one from a position in [E, D]. Returns the device that had it, or -1.
  int64_t take(Layer& layer, int64_t from) const {
    for (int64_t step = 0; step < experts_ * devices_; ++step) {
      const int64_t at = (from + step) % (experts_ * devices_), expert = at / devices_,
                    device = at % devices_;
      if (!layer.holds(device, expert)) continue;
      for (int64_t source = 0; source < devices_; ++source)
        if (layer.route(expert, source) == device) layer.send(expert, source, layer.owner(expert));
      layer.drop(expert, device);
      return device;
    }
    return -1;
  }

  int64_t busiest(const Layer& layer) const {
    int64_t found = 0;
    for (int64_t device = 1; device < devices_; ++device)
      if (layer.busy(device) > layer.busy(found)) found = device;
    return found;
  }

  // Removes replicas that compute nothing, unless the others' transfers then take longer.
  void prune() {
    for (int64_t expert = 0; expert < experts_; ++expert)
      for (const int32_t device : best_.holders(expert)) {
        if (best_.at(expert, device)) continue;
        for (int64_t from = 0; from < devices_; ++from)  // routes of no tokens
          if (best_.route(expert, from) == device) best_.send(expert, from, best_.owner(expert));
        best_.drop(expert, device);
        const double seconds = best_.seconds();
        if (seconds > seconds_)
          best_.copy(expert, device);
        else
          seconds_ = seconds;
      }
  }

  double keep(const Layer& layer) {
    const double seconds = layer.seconds();
    if (seconds < seconds_) best_ = layer, seconds_ = seconds;
    return seconds;
  }

  int64_t experts_, devices_, slots_;
  Layer best_;
  double seconds_;
  int64_t work_;
  std::vector<Weights> sources_;
  std::vector<std::pair<double, Layer>> ends_;  // (seconds, placement) found by passes
};

}  // namespace

Layer search(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs, int64_t slots,
             bool eplb) {
  return Search(Layer(counts, experts, devices, costs), slots).run(eplb);
}

}  // namespace oases::experts
