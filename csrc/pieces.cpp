#include "pieces.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

namespace oases {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

struct Slot : torch::CustomClassHolder {
  Tensor gradient;
};

// Source of a graph: an input whose gradient is requested by its edge, or found in its slot,
// without keeping its memory.
struct Source : torch::autograd::Function<Source> {
  static Tensor forward(AutogradContext* context, const Tensor&, const Tensor& data,
                        const c10::intrusive_ptr<torch::CustomClassHolder>& slot) {
    context->saved_data["slot"] = c10::IValue::make_capsule(slot);
    return data.detach();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    c10::static_intrusive_pointer_cast<Slot>(context->saved_data["slot"].toCapsule())->gradient =
        gradients[0];
    return {Tensor(), Tensor(), Tensor()};
  }
};

// Makes autograd record a source; its gradient is not used.
const Tensor& anchor() {
  static const Tensor found = at::zeros({}).requires_grad_();
  return found;
}

Edge edge_of(const Tensor& tensor) {
  return tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

// Whether the memory has no other user: sums need memory of their own.
bool is_sole_owner(const Tensor& tensor) {
  return tensor.is_contiguous() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

bool shares_memory(const Tensor& one, const Tensor& other) {
  return one.has_storage() && other.has_storage() &&
         one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

// The leaves of a graph, each once, with the edge at which their gradients arrive.
std::vector<std::pair<Edge, Tensor>> leaves_of(const edge_list& roots) {
  std::vector<std::pair<Edge, Tensor>> found;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<Edge> waiting(roots.begin(), roots.end());
  while (!waiting.empty()) {
    const Edge edge = std::move(waiting.back());
    waiting.pop_back();
    torch::autograd::Node* node = edge.function.get();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      found.emplace_back(Edge(edge.function, 0), leaf->variable);
      continue;
    }
    for (const Edge& next : node->next_edges())
      if (next.is_valid()) waiting.push_back(next);
  }
  return found;
}

// Whether the device multiplies 16-bit matrices into a float32 one. Elsewhere the product is rounded to 16 bits first,
// and then moved twice, to be cast and to be added.
bool sums_in_float(const Tensor& matrix) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::addmm", "dtype_out");
  return op.hasKernelForDispatchKey(
      c10::computeDispatchKey(matrix.scalar_type(), matrix.layout(), matrix.device()));
}

}  // namespace

Leaves::Leaves(const std::vector<Tensor>& originals) : shares_(originals.size()), wholes_(originals.size()) {
  stand_ins_.reserve(originals.size());
  for (const Tensor& original : originals) {
    Tensor made = original.detach();
    if (original.requires_grad()) made.requires_grad_();
    // Sums over sub-batches have the dtype of those over micro-batches.
    if (original.is_leaf() && original.grad_dtype() != original.scalar_type())
      made.set_grad_dtype(original.grad_dtype());
    numbers_.emplace(made.unsafeGetTensorImpl(), stand_ins_.size());
    stand_ins_.push_back(std::move(made));
  }
}

Gradient& Leaves::sum_of(const Tensor& stand_in, bool whole) {
  return (whole ? wholes_ : shares_)[numbers_.at(stand_in.unsafeGetTensorImpl())];
}

void Leaves::add(const Tensor& stand_in, Tensor gradient, bool whole) {
  Gradient& sum = sum_of(stand_in, whole);
  if (sum) {
    sum->add_(gradient);
    return;
  }
  const auto dtype = stand_in.grad_dtype().value_or(gradient.scalar_type());
  if (gradient.scalar_type() != dtype)
    sum = gradient.to(dtype);
  else
    sum = is_sole_owner(gradient) ? std::move(gradient) : gradient.clone(at::MemoryFormat::Contiguous);
}

void Leaves::add_matmul(const Tensor& stand_in, const Tensor& rows, const Tensor& columns) {
  Gradient& sum = sum_of(stand_in, false);
  const auto dtype = stand_in.grad_dtype().value_or(rows.scalar_type());
  if (sum && sum->scalar_type() == rows.scalar_type()) {
    sum->addmm_(rows.t(), columns);
  } else if (dtype == at::kFloat && at::isReducedFloatingType(rows.scalar_type()) && sums_in_float(rows)) {
    const double before = sum ? 1 : 0;
    if (!sum) sum = at::empty(stand_in.sizes(), rows.options().dtype(dtype));
    at::addmm_out(*sum, *sum, rows.t(), columns, dtype, before, 1);
  } else {
    add(stand_in, at::matmul(rows.t(), columns), false);
  }
}

std::vector<Gradient> Leaves::take(bool whole) {
  return std::exchange(whole ? wholes_ : shares_, std::vector<Gradient>(stand_ins_.size()));
}

// --- deferred weight gradients ---

// used: the weight as the matmul reads it, which under autocast is a copy of another dtype. The gradients are those of
// the stand-ins weight and bias.
struct DeferredLinear : torch::autograd::Function<DeferredLinear> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight, const Gradient& bias,
                        const Tensor& used, const Gradient& used_bias,
                        c10::intrusive_ptr<DeferredGradients> deferred, bool transposed) {
    const bool skipped = deferred->skip_last_ && deferred->calls_ == deferred->skippable_;
    context->save_for_backward({x, weight, bias.value_or(Tensor()), used});
    context->saved_data["deferred"] = c10::IValue::make_capsule(deferred);
    context->saved_data["transposed"] = transposed;
    if (!skipped) return at::linear(x, transposed ? used.t() : used, used_bias);
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(transposed ? 1 : 0);
    return x.new_empty({}).expand(sizes);  // a shape without memory
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], weight = saved[1], bias = saved[2], used = saved[3], grad = gradients[0];
    const bool transposed = context->saved_data["transposed"].toBool();
    auto deferred =
        c10::static_intrusive_pointer_cast<DeferredGradients>(context->saved_data["deferred"].toCapsule());
    const Tensor inputs = x.detach().flatten(0, -2), outputs = grad.flatten(0, -2);
    deferred->note(grad, [=](Leaves& leaves) {
      if (weight.requires_grad())
        leaves.add_matmul(weight, transposed ? inputs : outputs, transposed ? outputs : inputs);
      if (bias.defined() && bias.requires_grad()) leaves.add(bias, outputs.sum(0), false);
    });
    Tensor back;
    if (context->needs_input_grad(0)) back = at::matmul(grad, transposed ? used.t() : used);
    return {back, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

bool DeferredGradients::takes(const std::vector<Gradient>& tensors) const {
  for (const Gradient& tensor : tensors)
    if (tensor && !leaves_->holds(*tensor)) return false;
  return true;
}

void DeferredGradients::begin(bool skip_last) {
  calls_ = 0;
  skip_last_ = skip_last;
  last_output_.reset();
}

void DeferredGradients::end(const Gradient& result) {
  if (result) {
    const bool made = last_output_.defined() && shares_memory(last_output_, *result) &&
                      last_output_.sizes() == result->sizes();
    skippable_ = made ? calls_ - 1 : -1;
  }
  last_output_.reset();
}

Gradient DeferredGradients::linear(const Tensor& x, const Tensor& weight, const Gradient& bias,
                                   bool transposed) {
  if (x.dim() < 2 || !takes({weight, bias}) || at::SavedTensorDefaultHooks::get_hooks()) return std::nullopt;
  Tensor input = x, used = weight.detach();
  Gradient used_bias = bias ? Gradient(bias->detach()) : bias;
  const auto device = x.device().type();
  if (at::autocast::is_autocast_enabled(device)) {
    const auto dtype = at::autocast::get_autocast_dtype(device);
    input = at::autocast::cached_cast(dtype, x, device);  // its backward casts the gradient
    // Not of the detached weight: autocast keeps copies of leaves that require gradients, for all sub-batches.
    used = at::autocast::cached_cast(dtype, weight, device).detach();
    if (bias) used_bias = at::autocast::cached_cast(dtype, *bias, device).detach();
  }
  const Tensor made =
      DeferredLinear::apply(input, weight, bias, used, used_bias,
                            c10::intrusive_ptr<DeferredGradients>::reclaim_copy(this), transposed);
  ++calls_;
  // Detached: the graph of an output holds this object, and a cycle through a graph is never collected.
  last_output_ = made.detach();
  return made;
}

void DeferredGradients::note(Tensor grad, std::function<void(Leaves&)> work) {
  notes_.push_back({std::move(grad), std::move(work)});
}

void DeferredGradients::compute() {
  const at::NoGradGuard no_grad;
  for (const Note& note : std::exchange(notes_, {})) note.work(*leaves_);
}

// --- pieces ---

Tensor Piece::input(const Tensor& data) {
  const at::AutoGradMode enabled(true);
  slots_.push_back(c10::make_intrusive<Slot>());
  Tensor made = Source::apply(anchor(), data, slots_.back());
  sources_.push_back(edge_of(made));
  return made;
}

Tensor Piece::output(const Tensor& result, bool overwritten) {
  roots_.push_back(edge_of(result));
  if (overwritten) result.unsafeGetTensorImpl()->bump_version();
  return result.detach();
}

std::vector<Gradient> Piece::backward(const std::vector<Gradient>& gradients, bool fresh) {
  TORCH_CHECK(gradients.size() == roots_.size(), "a piece of ", roots_.size(), " results was given ",
              gradients.size(), " gradients");
  edge_list roots;
  variable_list given;
  for (size_t i = 0; i < roots_.size(); ++i) {
    if (!roots_[i].is_valid() || !gradients[i]) continue;
    roots.push_back(std::move(roots_[i]));
    given.push_back(*gradients[i]);
  }
  roots_.clear();
  edge_list wanted = std::exchange(sources_, {});
  const auto slots = std::exchange(slots_, {});
  std::vector<Gradient> found(slots.size());
  if (roots.empty()) return found;
  auto& engine = torch::autograd::Engine::get_default_engine();
  if (leaves_.empty()) {
    engine.execute(roots, given, false, false, true);
    for (size_t i = 0; i < slots.size(); ++i) {
      Tensor& gradient = c10::static_intrusive_pointer_cast<Slot>(slots[i])->gradient;
      if (gradient.defined()) found[i] = std::move(gradient);
    }
    return found;
  }
  std::vector<std::pair<Leaves*, Tensor>> summed;
  for (auto& [edge, leaf] : leaves_of(roots)) {
    for (const auto& leaves : leaves_) {
      if (!leaf.defined() || !leaves->holds(leaf)) continue;
      wanted.push_back(edge);
      summed.emplace_back(leaves.get(), leaf);
      break;
    }
  }
  variable_list made = engine.execute(roots, given, false, false, false, wanted);
  for (size_t i = 0; i < slots.size(); ++i)
    if (made[i].defined()) found[i] = std::move(made[i]);
  const at::NoGradGuard no_grad;
  if (fresh) {
    for (Gradient& gradient : found)
      if (gradient && (gradient->use_count() > 1 || gradient->storage().use_count() > 1))
        gradient = gradient->clone();
  }
  for (size_t i = 0; i < summed.size(); ++i) {
    Tensor& gradient = made[slots.size() + i];
    if (gradient.defined()) summed[i].first->add(summed[i].second, std::move(gradient), whole_);
  }
  return found;
}

uint64_t generator_mark(const at::Generator& generator) {
  if (generator.device().type() != c10::DeviceType::CPU)
    return generator.current_seed() * 0x9E3779B97F4A7C15ull + generator.get_offset();
  auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  const at::mt19937_data_pod data = cpu->engine().data();
  uint64_t mark = data.seed_;
  // Normal numbers are drawn in pairs, of which the second is cached; a whole block of the
  // engine changes its state.
  const uint64_t parts[] = {static_cast<uint64_t>(data.left_),
                            data.next_,
                            data.state_[0],
                            data.state_[1],
                            static_cast<uint64_t>(cpu->next_float_normal_sample().has_value()),
                            static_cast<uint64_t>(cpu->next_double_normal_sample().has_value())};
  for (const uint64_t part : parts) mark = (mark ^ part) * 0x9E3779B97F4A7C15ull + (mark >> 29);
  return mark;
}

}  // namespace oases
