// Local refinement of a placement's routes and replicas: the last phase of csrc/experts_search.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "experts.h"

namespace oases::experts {

// Minimum fraction of a device's mean load for which a replica is created.
constexpr double kWorthwhile = 0.01;
// Fraction of the largest load above which a device is hot.
constexpr double kHot = 0.97;
// Maximum number of devices examined for a token's route in total, which bounds a refinement; and how often
// all are examined.
constexpr int64_t kWork = 5000;
constexpr int kSweeps = 6;

// Moves tokens from the busiest devices to others with a replica of the expert, or adds a replica there. A
// p-norm of all loads replaces the maximum, so that it decreases even if several devices are the busiest.
template <int kSquarings>
class Refinement {
 public:
  // The norm has p = 2^kSquarings. slots: replicas per device if replicas may be added.
  Refinement(Layer& layer, int64_t slots)
      : layer_(layer),
        devices_(layer.devices()),
        slots_(slots),
        computed_(devices_),
        sent_(devices_),
        received_(devices_) {
    const double all = std::accumulate(layer.tokens().begin(), layer.tokens().end(), 0.0);
    scale_ = all > 0 ? static_cast<double>(devices_) / all : 1;
    worthwhile_ = static_cast<int64_t>(kWorthwhile / scale_);
    for (int64_t device = 0; device < devices_; ++device) note(device);
    weigh();
  }

  // Returns the number of devices examined.
  int64_t improve() {
    exposed_ = layer_.exposed();
    for (int sweep = 0; sweep < kSweeps; ++sweep)
      if (!once()) break;
    return kWork - work_;
  }

 private:
  double power(double tokens) const {
    double found = tokens * scale_;
    for (int each = 0; each < kSquarings; ++each) found *= found;
    return found;
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

  // Derivative of the norm by the sum of powers.
  void weigh() {
    const auto slope = [&](double sum) {
      double root = sum;
      for (int each = 0; each < kSquarings; ++each) root = std::sqrt(root);
      return sum > 0 ? root / sum / scale_ / static_cast<double>(1 << kSquarings) : 0;
    };
    per_computed_ = layer_.compute_seconds() * slope(all_computed_);
    per_wire_ = layer_.wire_seconds() * slope(all_wire_);
  }

  bool once() {
    const auto most = [](const std::vector<double>& of) { return *std::max_element(of.begin(), of.end()); };
    const double share = power(kHot / scale_), computed = share * most(computed_);
    const double wire = share * std::max(most(sent_), most(received_));
    std::vector<std::pair<double, int64_t>> hottest;
    for (int64_t device = 0; device < devices_; ++device)
      if (computed_[device] > computed || received_[device] > wire)
        hottest.emplace_back(-per_computed_ * computed_[device] - per_wire_ * received_[device], device);
    std::sort(hottest.begin(), hottest.end());
    bool any = false;
    for (const auto& [heat, device] : hottest)
      for (int64_t expert = 0; expert < layer_.experts(); ++expert)
        if (layer_.holds(device, expert) ||
            (layer_.owner(expert) == device && (slots_ || layer_.number(expert))))
          for (int64_t from = 0; from < devices_; ++from)
            if (layer_.route(expert, from) == device && layer_.count(expert, from) &&
                move(expert, from, device))
              any = true;
    for (int64_t from = 0; from < devices_; ++from)
      if (sent_[from] > wire)
        for (int64_t expert = 0; expert < layer_.experts(); ++expert)
          if (layer_.count(expert, from) && (slots_ || layer_.holds(from, expert)) &&
              layer_.route(expert, from) != from && move(expert, from, layer_.route(expert, from)))
            any = true;
    return any && work_ > 0;
  }

  bool move(int64_t expert, int64_t from, int64_t now) {
    if (work_ <= 0) return false;
    work_ -= devices_;
    const double tokens = static_cast<double>(layer_.count(expert, from));
    const bool more = slots_ && layer_.count(expert, from) > worthwhile_;
    const double sent = layer_.sent()[from];
    double away = per_computed_ * (power(layer_.tokens()[now] - tokens) - computed_[now]);
    if (now != from)
      away += per_wire_ * (power(layer_.received()[now] - tokens) - received_[now]);
    else
      away += per_wire_ * (power(sent + tokens) - sent_[from]);
    double least = -1e-9 * layer_.compute_seconds(), least_copied = least;
    int64_t chosen = -1, copied = -1;
    for (int64_t to = 0; to < devices_; ++to) {
      const bool held = to == layer_.owner(expert) || layer_.holds(to, expert);
      if (to == now || (!held && (!more || layer_.copies(to) >= slots_))) continue;
      double change = away + per_computed_ * (power(layer_.tokens()[to] + tokens) - computed_[to]);
      if (to == from)
        change += per_wire_ * (power(sent - tokens) - sent_[from]);
      else
        change += per_wire_ * (power(layer_.received()[to] + tokens) - received_[to]);
      if (held && change < least) least = change, chosen = to;
      if (!held && change < least_copied) least_copied = change, copied = to;
    }
    if (copied >= 0 && least_copied < least) {
      work_ -= 4 * devices_;
      layer_.copy(expert, copied);
      const double exposed = layer_.exposed();
      if (least_copied + exposed - exposed_ < least)
        chosen = copied, exposed_ = exposed;
      else
        layer_.drop(expert, copied);
    }
    if (chosen < 0) return false;
    layer_.send(expert, from, chosen);
    for (const int64_t device : {from, now, chosen}) note(device);
    weigh();
    return true;
  }

  Layer& layer_;
  int64_t devices_;
  int64_t slots_;
  std::vector<double> computed_, sent_, received_;  // by device, to the power of p
  double scale_ = 1, all_computed_ = 0, all_wire_ = 0, per_computed_ = 0, per_wire_ = 0;
  double exposed_ = 0;
  int64_t worthwhile_ = 0, work_ = kWork;
};

}  // namespace oases::experts
