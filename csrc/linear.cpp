#include "linear.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

#include "scheduler.h"

namespace oases {
namespace {

using at::Tensor;
using Tickets = std::vector<std::shared_ptr<Ticket>>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

void check(const char* op, const Tensor& x, const Tensor& weight, int64_t num_chunks) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2, op,
              ": needs an input of at least 1 and a weight of 2 dimensions, got ", x.dim(), " and ",
              weight.dim());
  TORCH_CHECK(x.size(-1) == weight.size(1), op, ": the input's last dimension is ", x.size(-1),
              " but the weight takes ", weight.size(1), " features");
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), op, ": the input is ", x.scalar_type(),
              " but the weight is ", weight.scalar_type(), "; convert one of them");
  TORCH_CHECK(num_chunks >= 1, op, ": num_chunks must be at least 1, got ", num_chunks);
}

// [a, b) of `total` for chunk k of n; sizes differ by at most one.
std::pair<int64_t, int64_t> span(int64_t total, int64_t n, int64_t k) {
  return {total * k / n, total * (k + 1) / n};
}

Tensor rows_of(const Tensor& x) { return x.reshape({-1, x.size(-1)}).contiguous(); }

std::vector<int64_t> with_last(const Tensor& x, int64_t features) {
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  return sizes;
}

void matmul_into(Tensor out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (bias)
    at::addmm_out(out, *bias, x, weight.t());
  else
    at::mm_out(out, x, weight.t());
}

// Writes x W^T + b to `out`, [..., out] with as many rows as x, which may be strided: then through a
// contiguous result, because one large matmul and a copy cost less than many small matmuls.
void product_into(const Tensor& out, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias) {
  if (out.is_contiguous()) return matmul_into(out.view({-1, out.size(-1)}), x, weight, bias);
  const Tensor whole = out.new_empty(out.sizes());
  matmul_into(whole.view({-1, out.size(-1)}), x, weight, bias);
  out.copy_(whole);
}

// Sequence-parallel view of an activation: [batch, sequence, features], whatever the leading dimensions.
Tensor sequences_of(const char* op, const Tensor& x) {
  TORCH_CHECK(x.dim() >= 2, op, ": sequence_parallel needs an input of at least 2 dimensions, got ", x.dim());
  return (x.dim() == 2 ? x.unsqueeze(0) : x.flatten(0, -3)).contiguous();
}

// Chunking of sequence-parallel activations: along the batch, where every chunk is contiguous, or, if the
// batch has too few entries, into the same rows [a, b) of every rank's shard of the sequence.
class Cut {
 public:
  Cut(int64_t num_chunks, int64_t ranks, int64_t batch, int64_t part)
      : ranks_(ranks),
        batch_(batch),
        part_(part),
        along_batch_(batch == 0 || batch >= std::min(num_chunks, part)),
        chunks_(std::max<int64_t>(1, std::min(num_chunks, along_batch_ ? batch : part))) {}
  int64_t chunks() const { return chunks_; }
  // Chunk k of a rank's shard [batch, part, features].
  Tensor of_part(const Tensor& x, int64_t k) const { return narrow(x, 1, k); }
  // Chunk k of a whole [batch, ranks * part, features], as [its batch, ranks, its part, features].
  Tensor of_whole(const Tensor& x, int64_t k) const {
    return narrow(x.view({batch_, ranks_, part_, x.size(-1)}), 2, k);
  }

 private:
  Tensor narrow(const Tensor& x, int64_t sequence_dim, int64_t k) const {
    const auto [from, to] = span(along_batch_ ? batch_ : part_, chunks_, k);
    return x.narrow(along_batch_ ? 0 : sequence_dim, from, to - from);
  }
  int64_t ranks_, batch_, part_;
  bool along_batch_;
  int64_t chunks_;
};

// All-gather of every rank's sequence shard: it delivers a chunk rank-major, [t, batch, part, features];
// whole is [batch, t * part, features].
class Gather {
 public:
  // keep: assemble the chunks in whole() as they arrive.
  Gather(OverlapScheduler& scheduler, const Tensor& part, int64_t num_chunks, const char* label, bool keep)
      : scheduler_(scheduler), cut_(num_chunks, scheduler.size(), part.size(0), part.size(1)) {
    if (keep) whole_ = part.new_empty({part.size(0), scheduler.size() * part.size(1), part.size(2)});
    for (int64_t k = 0; k < cut_.chunks(); ++k) {
      const Tensor mine = cut_.of_part(part, k).contiguous();
      arrived_.push_back(part.new_empty({scheduler.size(), mine.size(0), mine.size(1), mine.size(2)}));
      tickets_.push_back(scheduler.all_gather(arrived_.back(), mine, label));
    }
  }
  const Cut& cut() const { return cut_; }
  // Waits for the rows of chunk k, in the order of cut().of_whole().
  Tensor await(int64_t k) {
    scheduler_.wait(tickets_[k]);
    const Tensor arrived = std::exchange(arrived_[k], Tensor()).transpose(0, 1);
    if (!whole_.defined()) return rows_of(arrived);
    const Tensor chunk = cut_.of_whole(whole_, k);
    chunk.copy_(arrived);
    return rows_of(chunk.is_contiguous() ? chunk : arrived);
  }
  const Tensor& whole() const { return whole_; }

 private:
  OverlapScheduler& scheduler_;
  Cut cut_;
  Tensor whole_;
  std::vector<Tensor> arrived_;
  Tickets tickets_;
};

// Matmuls x W^T of the chunks of a gather, each computed while the next is in flight, into `out`: [batch,
// sequence, out].
void gathered_matmul(const Tensor& out, Gather& gather, const Tensor& weight,
                     const std::optional<Tensor>& bias) {
  for (int64_t k = 0; k < gather.cut().chunks(); ++k) {
    const Tensor rows = gather.await(k);
    product_into(gather.cut().of_whole(out, k), rows, weight, bias);
  }
}

// Matmuls x W^T of chunks, each reduce-scattered along the sequence while the next is computed. x: [batch,
// sequence, in] -> [batch, sequence / t, out]. The input is permuted to rank-major order, because it is the
// narrower side, so that the result needs no copy for reduce_scatter.
Tensor scattered_matmul(OverlapScheduler& scheduler, const Tensor& x, const Tensor& weight,
                        int64_t num_chunks, const char* label, const std::function<void()>& meanwhile) {
  const int64_t t = scheduler.size(), batch = x.size(0), sequence = x.size(1), features = weight.size(0);
  TORCH_CHECK(sequence % t == 0, "sequence_parallel: a sequence of ", sequence,
              " does not divide by the group size ", t);
  const Tensor y = x.new_empty({batch, sequence / t, features});
  const Cut cut(num_chunks, t, batch, sequence / t);
  std::vector<Tensor> reduced;
  Tickets tickets;
  for (int64_t k = 0; k < cut.chunks(); ++k) {
    const Tensor part = cut.of_whole(x, k).transpose(0, 1);
    const Tensor place = cut.of_part(y, k);
    Tensor unreduced = x.new_empty({t, place.size(0), place.size(1), features});
    matmul_into(unreduced.view({-1, features}), rows_of(part), weight, std::nullopt);
    // reduce_scatter needs contiguous memory; the rows of several batch entries are strided.
    reduced.push_back(place.is_contiguous() ? place : x.new_empty(place.sizes()));
    tickets.push_back(scheduler.reduce_scatter(reduced.back(), unreduced, label));
  }
  meanwhile();
  for (int64_t k = 0; k < cut.chunks(); ++k) {
    scheduler.wait(tickets[k]);
    const Tensor place = cut.of_part(y, k);
    if (!place.is_contiguous()) place.copy_(reduced[k]);
  }
  return y;
}

// Matmuls x W^T of row chunks, each all-reduced in place while the next is computed.
Tensor reduced_matmul(OverlapScheduler& scheduler, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, int64_t num_chunks, const char* label,
                      const std::function<void()>& meanwhile) {
  const Tensor y = x.new_empty({x.size(0), weight.size(0)});
  const int64_t chunks = std::max<int64_t>(1, std::min(num_chunks, x.size(0)));
  Tickets tickets;
  for (int64_t k = 0; k < chunks; ++k) {
    const auto [from, to] = span(x.size(0), chunks, k);
    const Tensor part = y.narrow(0, from, to - from);
    matmul_into(part, x.narrow(0, from, to - from), weight, std::nullopt);
    tickets.push_back(scheduler.all_reduce(part, label));
  }
  meanwhile();
  for (int64_t k = 0; k < chunks; ++k) {
    const auto [from, to] = span(x.size(0), chunks, k);
    scheduler.wait(tickets[k]);
    if (bias) y.narrow(0, from, to - from).add_(*bias);
  }
  return y;
}

}  // namespace

Tensor column_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const std::string& group, int64_t num_chunks, bool sequence_parallel) {
  check("column_linear", x, weight, num_chunks);
  const int64_t features = weight.size(0);
  if (!sequence_parallel) {
    const Tensor y = x.new_empty(with_last(x, features));
    matmul_into(y.view({-1, features}), rows_of(x), weight, bias);
    return y;
  }
  const auto scheduler = OverlapScheduler::of(group);
  Gather gather(*scheduler, sequences_of("column_linear", x), num_chunks, "column forward", false);
  auto sizes = with_last(x, features);
  sizes[sizes.size() - 2] *= scheduler->size();
  const Tensor y = x.new_empty(sizes);
  gathered_matmul(sequences_of("column_linear", y), gather, weight, bias);
  return y;
}

Tensor weight_gradient(const Tensor& grad_rows, const Tensor& rows, bool trains) {
  return trains ? at::mm(grad_rows.t(), rows) : rows.new_empty({0});
}

Gradients column_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                 const std::string& group, int64_t num_chunks, bool sequence_parallel,
                                 bool weight_trains) {
  const auto scheduler = OverlapScheduler::of(group);
  const Tensor grad_rows = rows_of(grad);
  Tensor grad_x, grad_weight, grad_bias;
  if (!sequence_parallel) {
    grad_x =
        reduced_matmul(*scheduler, grad_rows, weight.t(), std::nullopt, num_chunks, "column backward", [&] {
          grad_weight = weight_gradient(grad_rows, rows_of(x), weight_trains);
          grad_bias = grad_rows.sum(0);
        }).view(x.sizes());
    return {grad_x, grad_weight, grad_bias};
  }
  // The gathered input was not kept; it is gathered again under the matmuls of the input gradient.
  std::optional<Gather> gather;
  grad_x =
      scattered_matmul(
          *scheduler, sequences_of("column_linear_backward", grad), weight.t(), num_chunks, "column backward",
          [&] {
            gather.emplace(*scheduler, sequences_of("column_linear_backward", x), 1, "column regather", true);
            grad_bias = grad_rows.sum(0);
          })
          .view(x.sizes());
  gather->await(0);
  grad_weight = weight_gradient(grad_rows, rows_of(gather->whole()), weight_trains);
  return {grad_x, grad_weight, grad_bias};
}

Tensor row_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const std::string& group, int64_t num_chunks, bool sequence_parallel) {
  check("row_linear", x, weight, num_chunks);
  const auto scheduler = OverlapScheduler::of(group);
  if (!sequence_parallel)
    return reduced_matmul(*scheduler, rows_of(x), weight, bias, num_chunks, "row forward", [] {})
        .view(with_last(x, weight.size(0)));
  auto sizes = with_last(x, weight.size(0));
  sizes[sizes.size() - 2] /= scheduler->size();
  Tensor y =
      scattered_matmul(*scheduler, sequences_of("row_linear", x), weight, num_chunks, "row forward", [] {});
  if (bias) y.add_(*bias);
  return y.view(sizes);
}

Gradients row_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                              const std::string& group, int64_t num_chunks, bool sequence_parallel,
                              bool weight_trains) {
  const Tensor x_rows = rows_of(x);
  if (!sequence_parallel) {
    const Tensor grad_rows = rows_of(grad);
    return {at::mm(grad_rows, weight).view(x.sizes()), weight_gradient(grad_rows, x_rows, weight_trains),
            grad_rows.sum(0)};
  }
  const auto scheduler = OverlapScheduler::of(group);
  Gather gather(*scheduler, sequences_of("row_linear_backward", grad), num_chunks, "row backward", true);
  // Each rank adds the bias to its shard of the sequence, so its gradient is a partial sum.
  const Tensor grad_bias = rows_of(grad).sum(0);
  const auto bias_ticket = scheduler->all_reduce(grad_bias, "row bias");
  const Tensor grad_x = x.new_empty(x.sizes());
  gathered_matmul(sequences_of("row_linear_backward", grad_x), gather, weight.t(), std::nullopt);
  const Tensor grad_weight = weight_gradient(rows_of(gather.whole()), x_rows, weight_trains);
  scheduler->wait(bias_ticket);
  return {grad_x, grad_weight, grad_bias};
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Both linears differ only in the pair of ops they dispatch to.
template <typename Op>
struct LinearFunction : torch::autograd::Function<LinearFunction<Op>> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, const std::string& group, int64_t num_chunks,
                        bool sequence_parallel) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x, weight});
    context->saved_data["group"] = group;
    context->saved_data["num_chunks"] = num_chunks;
    context->saved_data["sequence_parallel"] = sequence_parallel;
    context->saved_data["bias"] = bias.has_value();
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(Op::forward_name, "")
                               .template typed<decltype(column_linear)>();
    return op.call(x, weight, bias, group, num_chunks, sequence_parallel);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(Op::backward_name, "")
                               .template typed<decltype(column_linear_backward)>();
    auto [grad_x, grad_weight, grad_bias] =
        op.call(grads[0], saved[0], saved[1], context->saved_data["group"].toStringRef(),
                context->saved_data["num_chunks"].toInt(), context->saved_data["sequence_parallel"].toBool(),
                context->needs_input_grad(1));
    if (!context->needs_input_grad(1)) grad_weight = Tensor();
    if (!context->saved_data["bias"].toBool()) grad_bias = Tensor();
    return {grad_x, grad_weight, grad_bias, Tensor(), Tensor(), Tensor()};
  }
};

struct Column {
  static constexpr const char* forward_name = "oases::column_linear";
  static constexpr const char* backward_name = "oases::column_linear_backward";
};
struct Row {
  static constexpr const char* forward_name = "oases::row_linear";
  static constexpr const char* backward_name = "oases::row_linear_backward";
};

}  // namespace

Tensor column_linear_autograd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                              const std::string& group, int64_t num_chunks, bool sequence_parallel) {
  return LinearFunction<Column>::apply(x, weight, bias, group, num_chunks, sequence_parallel);
}

Tensor row_linear_autograd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::string& group, int64_t num_chunks, bool sequence_parallel) {
  return LinearFunction<Row>::apply(x, weight, bias, group, num_chunks, sequence_parallel);
}

}  // namespace oases
