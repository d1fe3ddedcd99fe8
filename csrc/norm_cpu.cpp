#include "philox.h"
#include "scalars.h"

namespace oases::cpu {
namespace {

int sums_of(const NormBackward& t) { return 1 + (t.grad_norm_bias != nullptr) + (t.grad_bias != nullptr); }

template <typename T>
void forward_row(const NormEpilogue& e, const NormForward& t, const Dropout& dropout, int64_t row) {
  const int64_t start = row * e.n;
  const T *y = static_cast<const T*>(t.y) + start, *x = static_cast<const T*>(t.x) + start;
  const T *bias = static_cast<const T*>(t.bias), *weight = static_cast<const T*>(t.weight);
  const T* norm_bias = static_cast<const T*>(t.norm_bias);
  T *out = static_cast<T*>(t.out) + start, *h = static_cast<T*>(t.h) + start;
  double sum = 0;
  for (int64_t i = 0; i < e.n; ++i) {
    float value = static_cast<float>(y[i]) + (bias ? static_cast<float>(bias[i]) : 0.0f);
    if (dropout.active()) value = dropout.apply_at(row, i, value);
    out[i] = static_cast<T>(value + static_cast<float>(x[i]));
    sum += static_cast<float>(out[i]);
  }
  const float mean = e.norm == Norm::layer ? static_cast<float>(sum / e.n) : 0.0f;
  double squares = 0;
  for (int64_t i = 0; i < e.n; ++i) {
    const float from_mean = static_cast<float>(out[i]) - mean;
    squares += double{from_mean} * from_mean;
  }
  const float rstd = static_cast<float>(1.0 / std::sqrt(squares / e.n + e.eps));
  if (e.norm == Norm::layer) t.mean[row] = mean;
  t.rstd[row] = rstd;
  for (int64_t i = 0; i < e.n; ++i) {
    const float value = (static_cast<float>(out[i]) - mean) * rstd * static_cast<float>(weight[i]);
    h[i] = static_cast<T>(value + (norm_bias ? static_cast<float>(norm_bias[i]) : 0.0f));
  }
}

// sums: this block's partial sums, [sums_of(t), n]: of weight, then, if needed, norm_bias and bias.
template <typename T>
void backward_row(const NormEpilogue& e, const NormBackward& t, const Dropout& dropout, int64_t row,
                  float* sums) {
  const int64_t start = row * e.n;
  const T* grad_out = t.grad_out ? static_cast<const T*>(t.grad_out) + start : nullptr;
  const T* grad_h = t.grad_h ? static_cast<const T*>(t.grad_h) + start : nullptr;
  const T *out = static_cast<const T*>(t.out) + start, *weight = static_cast<const T*>(t.weight);
  T* grad_y = t.grad_y ? static_cast<T*>(t.grad_y) + start : nullptr;
  T* grad_x = static_cast<T*>(t.grad_x) + start;
  float* of_norm_bias = t.grad_norm_bias ? sums + e.n : nullptr;
  float* of_bias = t.grad_bias ? sums + (of_norm_bias ? 2 : 1) * e.n : nullptr;
  const float mean = e.norm == Norm::layer ? t.mean[row] : 0.0f, rstd = t.rstd[row];
  double sum = 0, along = 0;  // of grad_h * weight, and of that times the normalised row
  for (int64_t i = 0; grad_h && i < e.n; ++i) {
    const float product = static_cast<float>(grad_h[i]) * static_cast<float>(weight[i]);
    sum += product;
    along += double{product} * ((static_cast<float>(out[i]) - mean) * rstd);
  }
  const float along_mean = e.norm == Norm::layer ? static_cast<float>(sum / e.n) : 0.0f;
  const float along_row = static_cast<float>(along / e.n);
  for (int64_t i = 0; i < e.n; ++i) {
    float grad = grad_out ? static_cast<float>(grad_out[i]) : 0.0f;
    if (grad_h) {
      const float normal = (static_cast<float>(out[i]) - mean) * rstd, g = static_cast<float>(grad_h[i]);
      grad += rstd * (g * static_cast<float>(weight[i]) - along_mean - normal * along_row);
      sums[i] += g * normal;
      if (of_norm_bias) of_norm_bias[i] += g;
    }
    grad_x[i] = static_cast<T>(grad);
    if (dropout.active()) grad = dropout.apply_at(row, i, grad);
    if (grad_y) grad_y[i] = static_cast<T>(grad);
    if (of_bias) of_bias[i] += grad;
  }
}

}  // namespace

void norm_forward(const NormEpilogue& e, const NormForward& t) {
  const Dropout dropout = make_dropout(e.p, e.seed, e.offset, e.n);
  with_type(e.dtype, [&](auto type) {
    each_row(e.rows, e.n, [&](int64_t row) { forward_row<decltype(type)>(e, t, dropout, row); });
  });
}

int64_t norm_backward_blocks(const NormEpilogue& e, const NormBackward&) { return row_blocks(e.rows); }

void norm_backward(const NormEpilogue& e, const NormBackward& t) {
  const Dropout dropout = make_dropout(e.p, e.seed, e.offset, e.n);
  const int64_t size = sums_of(t) * e.n;
  std::fill_n(t.partials, t.blocks * size, 0.0f);
  with_type(e.dtype, [&](auto type) {
    using T = decltype(type);
    each_row_of_blocks(e.rows, t.blocks, [&](int64_t block, int64_t row) {
      backward_row<T>(e, t, dropout, row, t.partials + block * size);
    });
    const float* from = t.partials;
    for (void* out : {t.grad_weight, t.grad_norm_bias, t.grad_bias}) {
      if (!out) continue;
      sum_partials(from, t.blocks, size, e.n, static_cast<T*>(out));
      from += e.n;
    }
  });
}

}  // namespace oases::cpu
