// What rounding changes in collectives of quantised numbers (quantized_backend.h), and what is known of it by layer.
#pragma once

#include <c10/core/Event.h>

#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "local_work.h"

namespace oases {

// Of one collective: what rounding changes, kept in `residual` [as the data], if there is one, and measured. steps:
// where a stream's are kept; the worker's thread keeps none.
class Rounding {
 public:
  at::Tensor residual;
  bool measured = false;
  std::vector<c10::intrusive_ptr<c10d::Work>>* steps = nullptr;

  bool wanted() const { return residual.defined() || measured; }
  void add_residual(const at::Tensor& data, int64_t at) const;
  // x [n] was packed; at: place in the data.
  void note(const at::Tensor& x, const at::Tensor& packed, int64_t at);
  // x: results, or what was sent.
  void note_result(const at::Tensor& x);
  // Squares of this rank's errors and of its results, [2], on the device of `like`.
  at::Tensor both(const at::Tensor& like) const;

 private:
  double squares_ = 0, norm_ = 0;
  at::Tensor squares_there_, norm_there_;  // the same, of an accelerator
};

// Known of a layer's collectives of one type. calls: of them; place: among layers, at which of 61 calls it is measured.
// above: samples in succession that were above the largest error. exempt: sent in bf16.
struct LayerErrors {
  // Of normal numbers it is below 0.01, and of what is not summed below 0.1, whatever the numbers; of sums that are
  // much smaller than what is summed it has no bound.
  static constexpr double kLargest = 0.25;

  // Of an accelerator, on its way to the host, which reads it when the next one is due. both: sums over the ranks of
  // squares of errors, and of results.
  struct Sample {
    at::Tensor both;
    c10::Event arrived;
  };

  int64_t calls = 0, place = 0;
  int above = 0;
  bool exempt = false;
  std::optional<Sample> sample;

  bool due() const;  // by the calls alone, so that all ranks measure the same one
  // Notes errors by their sums over the ranks [2], and exempts the layer where they have stayed above the largest.
  void judge(const std::string& layer, bool exemptable, const at::Tensor& both, Judgement& found);
};

using ErrorsByLayer = std::map<std::pair<c10d::OpType, std::string>, LayerErrors>;
LayerErrors& errors_of(ErrorsByLayer& layers, c10d::OpType type, const std::string& layer);

// "F 3.1 (stack 0, layer 1, ...)" -> "F 3 (stack 0, layer 1, ...)": all sub-batches of an op, whose errors are alike.
std::string layer_of(const std::string& label);

}  // namespace oases
