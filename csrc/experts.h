// Placement of experts: its cost, and the search for a cheap one. E experts, D devices; device e / (E / D)
// owns expert e. Source: Pro-Prophet (arXiv 2411.10003).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace oases::experts {

// Cost model; the fields are those of oases/moe/costs.py.
struct Costs {
  double token_seconds = 0, token_bytes = 0, expert_bytes = 0, bandwidth = 1, latency = 0;
  double both_ways = 0;  // 0: twice the bandwidth
  double non_expert_seconds = 0, backward = 2, handling_seconds = 0, fixed_seconds = 0;
  bool scheduled = true, mean_transfer = false, leading = false;
  int64_t devices_per_node = 0;  // 0: one node
  double node_bandwidth = 1;
};

// Loads of a layer under a placement, updated replica by replica.
class Layer {
 public:
  // counts: [E, D], the tokens of each device for each expert; must outlive this. Initially every expert is
  // only on its owner.
  Layer(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs);

  int64_t experts() const { return experts_; }
  int64_t devices() const { return devices_; }
  int64_t owner(int64_t expert) const { return expert / (experts_ / devices_); }
  int64_t count(int64_t expert, int64_t device) const { return counts_[expert * devices_ + device]; }
  int64_t route(int64_t expert, int64_t device) const { return routes_[expert * devices_ + device]; }
  // Whether a device has a replica (not as the owner); replicas of an expert, and on a device.
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

  // Adds a replica, which computes no tokens yet, or removes an unused one.
  void copy(int64_t expert, int64_t device);
  void drop(int64_t expert, int64_t device);
  // Adds replicas on all devices; each then computes its own tokens.
  void shadow(int64_t expert);
  // Routes the tokens of `device` for the expert to `by`.
  void send(int64_t expert, int64_t device, int64_t by);

  // Seconds of the layer, forward and backward: equation (8), or (6) without overlap.
  double seconds() const;
  // Seconds of replica transfers in the forward pass, and the exposed ones of both passes.
  double moving() const;
  // The first and the second round of the transfers.
  std::pair<double, double> rounds() const;
  // Seconds that the busiest device packs and unpacks experts, in both passes.
  double handling() const;
  double exposed() const;
  // Seconds of the forward pass under which transfers can be hidden if all devices are equal.
  double hidden() const;
  // Seconds that a device is busy with the tokens it computes and receives.
  double busy(int64_t device) const { return compute_ * tokens_[device] + wire_ * received_[device]; }
  // Seconds per computed token and per received token.
  double compute_seconds() const { return compute_; }
  double wire_seconds() const { return wire_; }

 private:
  void carry(int64_t expert, double sign);
  // Seconds of a link, given the bytes that each device sends and receives.
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
  // By device: tokens computed, sent, received; experts sent and received in the first round and
  // exchanged in the second.
  std::vector<double> tokens_, sent_, received_, out_, in_, exchanged_;
  // By node: tokens and experts that cross its border.
  std::vector<double> tokens_out_, tokens_in_, experts_out_, experts_in_;
};

// Pro-Prophet's greedy search: replicates the busiest device's heaviest experts until it is no busier than
// others, from several initial placements including FasterMoE's and EPLB's. slots: replicas per device.
// eplb: EPLB's alone. Returns the layer with the placement found.
Layer search(const int64_t* counts, int64_t experts, int64_t devices, const Costs& costs, int64_t slots,
             bool eplb);

}  // namespace oases::experts
