#include "rounding_errors.h"

#include <cmath>

#include "quantized_blocks.h"

namespace oases {
namespace {

// The error of one collective in so many of a layer is measured.
constexpr int64_t kSampled = 61;
// Samples in succession above the largest error after which a layer is sent in bf16.
constexpr int kPatience = 3;

void add(at::Tensor& total, const at::Tensor& x) {
  const at::Tensor squares = at::sum(at::square(x), at::kDouble);
  total = total.defined() ? total + squares : squares;
}

}  // namespace

void Rounding::add_residual(const at::Tensor& data, int64_t at) const {
  if (residual.defined()) at::Tensor(data).add_(residual.narrow(0, at, data.numel()));
}

void Rounding::note(const at::Tensor& x, const at::Tensor& packed, int64_t at) {
  if (!wanted()) return;
  const int64_t n = x.numel();
  const at::Tensor decoded = at::empty_like(x);
  blocks::unpack(packed, decoded);
  at::Tensor kept = residual.defined() ? residual.narrow(0, at, n) : residual;
  if (!x.is_cpu()) {
    const at::Tensor error = x - decoded;
    if (measured) add(squares_there_, error);
    if (kept.defined()) kept.copy_(at::where(at::isfinite(error), error, 0.0f));
    return;
  }
  const float *const numbers = x.const_data_ptr<float>(), *const back = decoded.const_data_ptr<float>();
  float* const lost = kept.defined() ? kept.mutable_data_ptr<float>() : nullptr;
  for (int64_t i = 0; i < n; ++i) {
    const float error = numbers[i] - back[i];
    squares_ += static_cast<double>(error) * error;
    if (lost) lost[i] = std::isfinite(error) ? error : 0.0f;
  }
}

void Rounding::note_result(const at::Tensor& x) {
  if (!measured) return;
  if (!x.is_cpu()) return add(norm_there_, x);
  const float* const numbers = x.const_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) norm_ += static_cast<double>(numbers[i]) * numbers[i];
}

at::Tensor Rounding::both(const at::Tensor& like) const {
  if (like.is_cpu()) return at::tensor({squares_, norm_}, at::kDouble);
  const at::Tensor none = at::zeros({}, like.options().dtype(at::kDouble));
  return at::stack(
      {squares_there_.defined() ? squares_there_ : none, norm_there_.defined() ? norm_there_ : none});
}

LayerErrors& errors_of(ErrorsByLayer& layers, c10d::OpType type, const std::string& layer) {
  const auto [place, is_new] = layers.try_emplace({type, layer});
  if (is_new) place->second.place = static_cast<int64_t>(layers.size()) - 1;
  return place->second;
}

bool LayerErrors::due() const { return calls % kSampled == place % kSampled; }

// By the errors of every rank's roundings, as if they were independent.
void LayerErrors::judge(const std::string& layer, bool exemptable, const at::Tensor& both, Judgement& found) {
  const double squares = both[0].item<double>(), norm = both[1].item<double>();
  if (!std::isfinite(squares)) return;  // of a NaN or an infinity, which the result shows
  const double error = squares == 0 ? 0.0 : std::sqrt(squares / norm);
  if (std::isfinite(error)) found.relative_error = error;
  above = exemptable && error > kLargest ? above + 1 : 0;
  if (above < kPatience) return;
  exempt = true;
  found.layer = layer;
}

std::string layer_of(const std::string& label) {
  const size_t dot = label.find('.'), open = label.find(" (");
  if (dot == std::string::npos || open == std::string::npos || open < dot) return label;
  return label.substr(0, dot) + label.substr(open);
}

}  // namespace oases
