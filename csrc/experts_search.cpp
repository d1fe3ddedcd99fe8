#include <algorithm>
#include <cmath>
#include <numeric>

#include "experts.h"

namespace oases::experts {

namespace {

// Levels that are tried, and the least share of a level for which a copy is made.
constexpr int kLevels = 10;
constexpr double kWorthwhile = 0.01;

class Search {
 public:
  Search(const Layer& nothing_copied, int64_t experts, int64_t devices, int64_t slots)
      : experts_(experts),
        devices_(devices),
        slots_(slots),
        best_(nothing_copied),
        seconds_(best_.seconds()) {}

  Layer run() {
    const Layer start = best_;
    fill_all(start, kLevels);
    shadow(start);
    prune();
    return best_;
  }

 private:
  // How long devices would be busy if all were alike, at the least, and the busiest is now.
  void fill_all(const Layer& start, int levels) {
    double sum = 0, most = 0;
    for (int64_t device = 0; device < devices_; ++device) {
      sum += start.busy(device);
      most = std::max(most, start.busy(device));
    }
    const double least = sum / static_cast<double>(devices_);
    for (int step = 0; step < levels; ++step) {
      const double share = static_cast<double>(step) / levels;
      Layer layer = start;
      fill(layer, least + (most - least) * share * share);
      keep(layer);
    }
  }

  // Bring each device down to the level, where others have room below it.
  void fill(Layer& layer, double level) {
    std::vector<int64_t> devices(devices_);
    std::iota(devices.begin(), devices.end(), 0);
    std::vector<double> busy(devices_);
    for (const int64_t device : devices) busy[device] = layer.busy(device);
    std::stable_sort(devices.begin(), devices.end(), [&](int64_t a, int64_t b) { return busy[a] > busy[b]; });
    const int64_t mine = experts_ / devices_;
    for (const int64_t device : devices) {
      std::vector<std::pair<int64_t, int64_t>> heaviest;  // (tokens computed here, expert)
      for (int64_t expert = device * mine; expert < (device + 1) * mine; ++expert)
        heaviest.emplace_back(at(layer, expert, device), expert);
      std::stable_sort(heaviest.begin(), heaviest.end(), [](auto& a, auto& b) { return a.first > b.first; });
      for (const auto& [tokens, expert] : heaviest)
        while (tokens > 0 && layer.busy(device) > level && relieve(layer, expert, device, level)) {
        }
    }
  }

  static constexpr double kNothing = 1e-12;

  int64_t at(const Layer& layer, int64_t expert, int64_t device) const {
    int64_t found = 0;
    for (int64_t from = 0; from < devices_; ++from)
      if (layer.route(expert, from) == device) found += layer.count(expert, from);
    return found;
  }

  // One more copy of the expert, where it takes most off its home. Its own tokens a device need not receive.
  bool relieve(Layer& layer, int64_t expert, int64_t home, double level) {
    const double compute = layer.compute_seconds(), wire = layer.wire_seconds();
    const double all = static_cast<double>(at(layer, expert, home) - own(layer, expert, home, home));
    int64_t chosen = -1;
    double most = kWorthwhile * level;
    for (int64_t device = 0; device < devices_; ++device) {
      if (device == home || layer.copies(device) >= slots_ || layer.holds(device, expert)) continue;
      const double room = level - layer.busy(device);
      if (room <= 0) continue;
      const double its = static_cast<double>(own(layer, expert, device, home));
      const double fits =
          its * compute > room ? 0 : its + (room - its * compute) / (compute + wire + kNothing);
      const double relief = std::min(fits, all) * (compute + wire) + its * wire;
      if (fits >= its && relief > most) most = relief, chosen = device;
    }
    if (chosen < 0) return false;
    layer.copy(expert, chosen);
    if (own(layer, expert, chosen, home)) layer.send(expert, chosen, chosen);
    std::vector<int32_t> sources;
    for (int64_t from = 0; from < devices_; ++from)
      if (from != home && layer.route(expert, from) == home && layer.count(expert, from) > 0)
        sources.push_back(static_cast<int32_t>(from));
    std::stable_sort(sources.begin(), sources.end(),
                     [&](int32_t a, int32_t b) { return layer.count(expert, a) > layer.count(expert, b); });
    for (const int32_t from : sources) {
      const double more = static_cast<double>(layer.count(expert, from)) * (compute + wire);
      if (layer.busy(home) <= level) break;
      if (layer.busy(chosen) + more <= level) layer.send(expert, from, chosen);
    }
    return true;
  }

  int64_t own(const Layer& layer, int64_t expert, int64_t device, int64_t home) const {
    return layer.route(expert, device) == home ? layer.count(expert, device) : 0;
  }

  // The heaviest experts to all who have tokens for them, as many as pay: the least is received so.
  void shadow(const Layer& start) {
    std::vector<std::pair<int64_t, int64_t>> heaviest;
    for (int64_t expert = 0; expert < experts_; ++expert) {
      int64_t tokens = 0;
      for (int64_t device = 0; device < devices_; ++device) tokens += start.count(expert, device);
      heaviest.emplace_back(tokens, expert);
    }
    std::stable_sort(heaviest.begin(), heaviest.end(), [](auto& a, auto& b) { return a.first > b.first; });
    Layer layer = start;
    double before = start.seconds();
    int in_vain = 0;
    std::vector<Layer> further;
    for (const auto& [tokens, expert] : heaviest) {
      for (int64_t device = 0; device < devices_; ++device) {
        if (device == layer.home(expert) || !layer.count(expert, device) || layer.copies(device) >= slots_)
          continue;
        layer.copy(expert, device);
        layer.send(expert, device, device);
      }
      keep(layer);
      const double now = layer.seconds();
      if (now >= before && ++in_vain == 2) break;
      if (now < before) further.push_back(layer), before = now;
    }
    // What is left uneven then is filled up; from the last ones, and from one half way.
    for (const size_t back : {size_t{1}, size_t{2}, further.size() / 2 + 1})
      if (back <= further.size()) fill_all(further[further.size() - back], kLevels / 2);
  }

  // Take copies away that cost more than they save.
  void prune() {
    for (int64_t expert = 0; expert < experts_; ++expert) {
      const auto held = best_.holders(expert);
      for (const int32_t device : held) {
        Layer layer = best_;
        for (int64_t from = 0; from < devices_; ++from)
          if (layer.route(expert, from) == device) layer.send(expert, from, layer.home(expert));
        layer.drop(expert, device);
        keep(layer, true);
      }
    }
  }

  // even: where it takes no longer, fewer copies are better.
  bool keep(const Layer& layer, bool even = false) {
    const double seconds = layer.seconds();
    if (even ? seconds > seconds_ : seconds >= seconds_) return false;
    best_ = layer;
    seconds_ = seconds;
    return true;
  }

  int64_t experts_, devices_, slots_;
  Layer best_;
  double seconds_;
};

}  // namespace

Layer search(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs, int64_t slots) {
  return Search(Layer(counts, experts, devices, costs), experts, devices, slots).run();
}

}  // namespace oases::experts
