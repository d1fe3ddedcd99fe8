// Where experts are computed besides at home: what a placement costs, and the search for a cheap one.
// E experts, D devices; expert e is at home on device e / (E / D). Source: Pro-Prophet (arXiv 2411.10003).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace oases::experts {

// See oases/moe/costs.py, whose fields these are.
struct Costs {
  double token_seconds = 0, token_bytes = 0, expert_bytes = 0, bandwidth = 1, latency = 0;
  double both_ways = 0;  // 0: twice the bandwidth
  double non_expert_seconds = 0, backward = 2, handling_seconds = 0, fixed_seconds = 0;
  bool scheduled = true, mean_transfer = false, leading = false;
  int64_t devices_per_node = 0;  // 0: one node
  double node_bandwidth = 1;
};

// What a layer does under a placement that is changed copy by copy.
class Layer {
 public:
  // counts: [E, D], the tokens of each device for each expert; they must outlive this. All tokens go home at
  // first.
  Layer(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs);

  int64_t experts() const { return experts_; }
  int64_t devices() const { return devices_; }
  int64_t home(int64_t expert) const { return expert / (experts_ / devices_); }
  int64_t count(int64_t expert, int64_t device) const { return counts_[expert * devices_ + device]; }
  int64_t route(int64_t expert, int64_t device) const { return routes_[expert * devices_ + device]; }
  // Whether a device has a copy, which its home is not; how many an expert has, and a device holds.
  bool holds(int64_t device, int64_t expert) const { return copied_[expert * devices_ + device] != 0; }
  int64_t number(int64_t expert) const { return number_[expert]; }
  int64_t copies(int64_t device) const { return held_[device]; }
  std::vector<int32_t> holders(int64_t expert) const;
  // Tokens of the expert that a device computes.
  int64_t at(int64_t expert, int64_t device) const;
  // By device: tokens computed, sent, received.
  const std::vector<double>& tokens() const { return tokens_; }
  const std::vector<double>& sent() const { return sent_; }
  const std::vector<double>& received() const { return received_; }

  // Put a copy of an expert on a device, which computes no token of it yet, or take an unused one away.
  void copy(int64_t expert, int64_t device);
  void drop(int64_t expert, int64_t device);
  // Put copies on all devices, each of which computes its own tokens from then on.
  void shadow(int64_t expert);
  // The tokens of `device` for the expert are computed by `by` from now on.
  void send(int64_t expert, int64_t device, int64_t by);

  // Seconds of the layer, forward and backward: equation (8), or (6) where nothing is scheduled.
  double seconds() const;
  // Seconds in which experts are under way, in the forward pass; and of those in both passes that nothing
  // hides.
  double moving() const;
  // Of it the first round and the second.
  std::pair<double, double> rounds() const;
  // Seconds in which the device with most to do packs and unpacks experts, in both passes.
  double handling() const;
  double exposed() const;
  // Seconds of the forward pass under which experts can be under way if all devices are alike.
  double hidden() const;
  // Seconds that a device is busy with the tokens it computes and receives.
  double busy(int64_t device) const { return compute_ * tokens_[device] + wire_ * received_[device]; }
  // Of it by one token that is computed, and by one that is received.
  double compute_seconds() const { return compute_; }
  double wire_seconds() const { return wire_; }

 private:
  void carry(int64_t expert, double sign);
  // Seconds of a link, by the numbers each device sends and receives, of one byte each.
  double on_the_wire(const std::vector<double>& sent, const std::vector<double>& received) const;
  int64_t node(int64_t device) const { return nodes_ == 1 ? 0 : device / costs_.devices_per_node; }

  int64_t experts_, devices_, nodes_;
  Costs costs_;
  double compute_, wire_;
  const int64_t* counts_;
  std::vector<int32_t> routes_;  // [E, D]
  std::vector<uint8_t> copied_;  // [E, D]
  std::vector<int32_t> number_;  // [E]
  std::vector<int32_t> held_;    // [D]
  // By device: tokens computed, sent, received; experts sent and received in the first round, exchanged in
  // the second.
  std::vector<double> tokens_, sent_, received_, out_, in_, exchanged_;
  // By node, what crosses its border: tokens and experts.
  std::vector<double> tokens_out_, tokens_in_, experts_out_, experts_in_;
};

// Pro-Prophet's greedy search: the busiest device's heaviest experts are copied until it is not busier than
// others; from several placements, FasterMoE's and EPLB's among them. slots: copies that a device may hold.
// effort: how often as much may be tried as by default. Returns the layer as it is placed then.
Layer search(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs, int64_t slots,
             double effort = 1);

}  // namespace oases::experts
