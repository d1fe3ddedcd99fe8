// torch.library ops that permute rows by expert and back.
#include <torch/library.h>

#include "dispatch.h"
#include "permute_kernels.h"

namespace oases {
namespace {

using at::Tensor;

constexpr int64_t kMostExperts = 1 << 20;

void check_routing(const char* op, const Tensor& ids, int64_t experts) {
  TORCH_CHECK(ids.dim() == 2, op, ": expert_ids must be [tokens, k], got ", ids.sizes());
  TORCH_CHECK(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op,
              ": expert_ids must be int64 or int32, got ", ids.scalar_type());
  TORCH_CHECK(experts >= 0 && experts <= kMostExperts, op, ": num_experts must be from 0 to ", kMostExperts,
              ", got ", experts);
}

struct Counted {
  Tensor ids, tile_offsets, counts;
};

// Without a check ids out of range count as the nearest expert, and nothing waits for the device.
Counted count(const char* op, const Tensor& expert_ids, int64_t experts, bool check) {
  check_routing(op, expert_ids, experts);
  Tensor ids = expert_ids.to(at::kLong).contiguous();
  if (!check && experts > 0) ids = ids.clamp(0, experts - 1);  // kernels would write out of bounds
  const int64_t slots = ids.numel();
  const Counted counted{ids, at::empty({experts, tiles_of(slots)}, ids.options()),
                        at::empty({experts}, ids.options())};
  const Tensor first_bad = at::full({1}, slots, ids.options());
  OASES_LAUNCH(ids, count_experts, ids.const_data_ptr<int64_t>(), slots, experts,
               counted.tile_offsets.data_ptr<int64_t>(), counted.counts.data_ptr<int64_t>(),
               first_bad.data_ptr<int64_t>());
  if (!check && experts > 0) return counted;
  const int64_t bad = first_bad.item<int64_t>();
  TORCH_CHECK(bad == slots, op, ": the expert id of slot ", bad, " is ",
              bad < slots ? ids.view(-1)[bad].item<int64_t>() : 0, ", which is not in [0, ", experts, ")");
  return counted;
}

Tensor histogram(const Tensor& expert_ids, int64_t experts, bool check) {
  return count("histogram", expert_ids, experts, check).counts;
}

std::tuple<Tensor, Tensor, Tensor> permute(const Tensor& x, const Tensor& expert_ids, int64_t experts,
                                           bool check) {
  dtype_of("permute", x);
  TORCH_CHECK(x.dim() == 2, "permute: x must be [tokens, n], got ", x.sizes());
  TORCH_CHECK(expert_ids.device() == x.device(), "permute: expert_ids are on ", expert_ids.device(),
              " but x is on ", x.device(), "; move one of them");
  check_routing("permute", expert_ids, experts);
  TORCH_CHECK(expert_ids.size(0) == x.size(0), "permute: x has ", x.size(0), " tokens but expert_ids has ",
              expert_ids.size(0));
  const Counted counted = count("permute", expert_ids, experts, check);
  const int64_t slots = counted.ids.numel(), n = x.size(1);
  const Tensor source = at::empty({slots}, counted.ids.options());
  const Tensor bases = at::empty({experts + 1}, counted.ids.options());
  const Tensor rows = at::empty({slots, n}, x.options());
  if (slots == 0) return {rows, source, counted.counts};
  OASES_LAUNCH(x, place_slots, counted.ids.const_data_ptr<int64_t>(), slots, experts,
               counted.tile_offsets.data_ptr<int64_t>(), counted.counts.const_data_ptr<int64_t>(),
               bases.data_ptr<int64_t>(), source.data_ptr<int64_t>());
  if (n == 0) return {rows, source, counted.counts};
  const Tensor dense = x.contiguous();
  OASES_LAUNCH(x, gather_rows, dense.const_data_ptr(), source.const_data_ptr<int64_t>(), expert_ids.size(1),
               slots, n * x.element_size(), rows.data_ptr());
  return {rows, source, counted.counts};
}

// Checks what belongs to `count` rows of the dtype and device of x. Returns k, the slots per token.
int64_t check_slots(const char* op, const Tensor& x, int64_t count, const Tensor& source,
                    const std::optional<Tensor>& weights, int64_t tokens) {
  dtype_of(op, x);
  TORCH_CHECK(source.scalar_type() == at::kLong && source.dim() == 1 && source.size(0) == count, op,
              ": source must be int64 [", count, "], one for each row, got ", source.scalar_type(), " ",
              source.sizes());
  TORCH_CHECK(source.device() == x.device(), op, ": source is on ", source.device(), " but rows are on ",
              x.device(), "; move one of them");
  TORCH_CHECK(tokens >= 0 && (tokens == 0 ? count == 0 : count % tokens == 0), op, ": ", count,
              " rows cannot be k rows for each of ", tokens, " tokens");
  const int64_t k = tokens == 0 ? 0 : count / tokens;
  if (!weights) return k;
  TORCH_CHECK(weights->scalar_type() == at::kFloat || weights->scalar_type() == x.scalar_type(), op,
              ": weights must be float32 or ", x.scalar_type(), " like the rows, got ",
              weights->scalar_type());
  TORCH_CHECK(weights->device() == x.device(), op, ": weights are on ", weights->device(),
              " but rows are on ", x.device(), "; move one of them");
  TORCH_CHECK(weights->dim() == 2 && weights->size(0) == tokens && (tokens == 0 || weights->size(1) == k), op,
              ": weights must be [", tokens, ", ", k, "], got ", weights->sizes());
  return k;
}

DType weights_dtype(const Tensor& rows, const std::optional<Tensor>& weights) {
  return dtype_of("unpermute", weights ? *weights : rows);
}

std::optional<Tensor> dense(const std::optional<Tensor>& x) {
  return x ? std::optional(x->contiguous()) : std::nullopt;
}

Tensor unpermute(const Tensor& rows, const Tensor& source, const std::optional<Tensor>& weights,
                 int64_t tokens) {
  TORCH_CHECK(rows.dim() == 2, "unpermute: rows must be [tokens * k, n], got ", rows.sizes());
  const int64_t k = check_slots("unpermute", rows, rows.size(0), source, weights, tokens);
  const int64_t slots = rows.size(0), n = rows.size(1);
  const Tensor out = at::empty({tokens, n}, rows.options());
  if (slots == 0) return out.zero_();
  const Tensor from = source.contiguous(), x = rows.contiguous();
  const Tensor inverse = at::empty({slots}, source.options());
  OASES_LAUNCH(rows, invert, from.const_data_ptr<int64_t>(), slots, inverse.data_ptr<int64_t>());
  if (rows.is_cpu()) {
    const int64_t missing = (inverse < 0).nonzero().numel();
    TORCH_CHECK(missing == 0, "unpermute: source must name every slot from 0 to ", slots - 1,
                " once; it leaves out ", missing, ", and ranges from ", from.min().item<int64_t>(), " to ",
                from.max().item<int64_t>());
  }
  if (n == 0) return out;
  const auto scale = dense(weights);
  OASES_LAUNCH(rows, combine_rows, x.const_data_ptr(), inverse.const_data_ptr<int64_t>(), data_or_null(scale),
               dtype_of("unpermute", rows), weights_dtype(rows, weights), tokens, k, n, out.data_ptr());
  return out;
}

// Rows are needed only for the gradient of weights: without weights they need not be kept.
std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& grad, const std::optional<Tensor>& rows,
                                              const Tensor& source, const std::optional<Tensor>& weights) {
  const char* op = "unpermute_backward";
  TORCH_CHECK(grad.dim() == 2 && source.dim() == 1, op,
              ": grad must be [tokens, n] and source [tokens * k], got ", grad.sizes(), " and ",
              source.sizes());
  const int64_t slots = source.size(0), n = grad.size(1);
  const int64_t k = check_slots(op, grad, slots, source, weights, grad.size(0));
  TORCH_CHECK(rows.has_value() == weights.has_value(), op, ": rows and weights go together");
  if (rows) {
    check_alike(op, "rows", *rows, grad);
    check_sizes(op, "rows", *rows, {slots, n});
  }
  const Tensor grad_rows = at::empty({slots, n}, grad.options());
  const Tensor grad_weights =
      weights ? at::zeros(weights->sizes(), weights->options()) : at::empty({0}, grad.options());
  if (slots == 0 || n == 0) return {grad_rows, grad_weights};
  const Tensor from = source.contiguous(), g = grad.contiguous();
  const auto x = dense(rows), scale = dense(weights);
  OASES_LAUNCH(grad, combine_rows_backward, g.const_data_ptr(), data_or_null(x),
               from.const_data_ptr<int64_t>(), data_or_null(scale), dtype_of(op, grad),
               weights_dtype(grad, weights), slots, k, n, grad_rows.data_ptr(),
               weights ? grad_weights.data_ptr() : nullptr);
  return {grad_rows, grad_weights};
}

Tensor histogram_meta(const Tensor& expert_ids, c10::SymInt experts, bool) {
  return at::empty_symint({experts}, expert_ids.options().dtype(at::kLong));
}

std::tuple<Tensor, Tensor, Tensor> permute_meta(const Tensor& x, const Tensor& expert_ids,
                                                c10::SymInt experts, bool) {
  const c10::SymInt slots = expert_ids.sym_size(0) * expert_ids.sym_size(1);
  const auto options = expert_ids.options().dtype(at::kLong);
  return {x.new_empty_symint({slots, x.sym_size(1)}), at::empty_symint({slots}, options),
          at::empty_symint({experts}, options)};
}

Tensor unpermute_meta(const Tensor& rows, const Tensor&, const std::optional<Tensor>&, c10::SymInt tokens) {
  return rows.new_empty_symint({tokens, rows.sym_size(1)});
}

std::tuple<Tensor, Tensor> unpermute_backward_meta(const Tensor& grad, const std::optional<Tensor>&,
                                                   const Tensor& source,
                                                   const std::optional<Tensor>& weights) {
  return {grad.new_empty_symint({source.sym_size(0), grad.sym_size(1)}),
          weights ? weights->new_empty_symint(weights->sym_sizes()) : grad.new_empty_symint({0})};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  library.def("histogram(Tensor expert_ids, SymInt num_experts, bool check=True) -> Tensor", kNotCaptured);
  library.def(
      "permute(Tensor x, Tensor expert_ids, SymInt num_experts, bool check=True) -> (Tensor, Tensor, Tensor)",
      kNotCaptured);
  library.def("unpermute(Tensor rows, Tensor source, Tensor? weights, SymInt tokens) -> Tensor");
  library.def(
      "unpermute_backward(Tensor grad, Tensor? rows, Tensor source, Tensor? weights) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("histogram", histogram);
  library.impl("permute", permute);
  library.impl("unpermute", unpermute);
  library.impl("unpermute_backward", unpermute_backward);
}

TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("histogram", histogram);
  library.impl("permute", permute);
  library.impl("unpermute", unpermute);
  library.impl("unpermute_backward", unpermute_backward);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("histogram", histogram_meta);
  library.impl("permute", permute_meta);
  library.impl("unpermute", unpermute_meta);
  library.impl("unpermute_backward", unpermute_backward_meta);
}

}  // namespace oases
