// What rounding changes in collectives of quantised numbers (quantized_backend.h), and what is known of it by layer.
#pragma once

#include <c10/core/Event.h>

#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "local_work.h"
#include "quantize_kernels.h"

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
  void note(const Quantization& how, const at::Tensor& x, const at::Tensor& packed, int64_t at);
  // x: results, or what was sent.
  void note_result(const at::Tensor& x);
  // Squares of this rank's errors and of its results, [2], on the device of `like`.
  at::Tensor both(const at::Tensor& like) const;

 private:
  double squares_ = 0, norm_ = 0;
  at::Tensor squares_there_, norm_there_;  // the same, of an accelerator
};

// Known of a layer. calls: of its collectives; place: among layers, at which of 61 calls it is measured. above: samples
// in succession that were above the largest error.
struct LayerErrors {
  // Of the numbers of int4, the coarsest code, rounded twice, Gaussian ones have an error of 0.15.
  static constexpr double kLargest = 0.25;

  // Of an accelerator, on its way to the host, which reads it when the next one is due. both: sums over the ranks of
  // squares of errors, and of results.
  struct Sample {
    at::Tensor both;
    c10::Event arrived;
  };

  int64_t calls = 0, place = 0;
  int above = 0;
  bool rotated = false, exempt = false;
  std::optional<Sample> sample;

  bool due() const;  // by the calls alone, so that all ranks measure the same one
  // Whether errors, by their sums over the ranks [2], have stayed above the largest.
  bool stay_above(bool exemptable, const at::Tensor& both, Judgement& found);
  // How the layer is sent, of `how`, the wire's.
  Quantization chosen(Quantization how) const;
  // Sends the layer in another way from now on than `how`, the wire's.
  void change(const std::string& layer, const Quantization& how, Judgement& found);
};

using ErrorsByLayer = std::map<std::string, LayerErrors>;
LayerErrors& errors_of(ErrorsByLayer& layers, const std::string& layer);

// "F 3.1 (stack 0, layer 1, ...)" -> "F 3 (stack 0, layer 1, ...)": all sub-batches of an op, whose errors are alike.
std::string layer_of(const std::string& label);

}  // namespace oases
