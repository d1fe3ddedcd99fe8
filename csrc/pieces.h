// Pieces of a step's autograd graph, cut where a schedule has ops of its own, and their gradients.
//
// A schedule runs the backward pass op by op. So every op records a graph of its own, from sources, which are
// its inputs, to one or several roots. It reads parameters through stand-ins (detached, sharing memory),
// whose gradients are summed here instead of in the parameters, whose hooks must fire once, later.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace oases {

using Gradient = std::optional<at::Tensor>;

// Stand-ins of tensors, each with two sums of gradients: `share` of partial ones (before a sum over the
// ranks) and `whole` of complete ones.
class Leaves {
 public:
  explicit Leaves(const std::vector<at::Tensor>& originals);

  const std::vector<at::Tensor>& stand_ins() const { return stand_ins_; }
  bool holds(const at::Tensor& tensor) const { return numbers_.count(tensor.unsafeGetTensorImpl()) > 0; }
  // Adds to the sum of a stand-in, in memory of its own and in the gradient's dtype.
  void add(const at::Tensor& stand_in, at::Tensor gradient, bool whole);
  // Adds rows^T @ columns, fused into the matmul if possible.
  void add_matmul(const at::Tensor& stand_in, const at::Tensor& rows, const at::Tensor& columns);
  // Returns the sums by stand-in and clears them.
  std::vector<Gradient> take(bool whole);

 private:
  Gradient& sum_of(const at::Tensor& stand_in, bool whole);

  std::vector<at::Tensor> stand_ins_;
  std::unordered_map<c10::TensorImpl*, size_t> numbers_;
  std::vector<Gradient> shares_, wholes_;
};

// Weight gradients deferred by a piece's backward pass, for an op W to compute (zero-bubble style).
class DeferredGradients : public torch::CustomClassHolder {
 public:
  explicit DeferredGradients(std::shared_ptr<Leaves> leaves) : leaves_(std::move(leaves)) {}

  // Whether all tensors are stand-ins; autograd handles a weight computed from others.
  bool takes(const std::vector<Gradient>& tensors) const;
  // Call before a forward pass. skip_last: the matmul that computes its result may be
  // left out, if it is known.
  void begin(bool skip_last);
  // Call after it. result: its result, if its last matmul may be left out next time.
  void end(const Gradient& result);
  // F.linear with a deferred weight gradient, in autocast's dtype where that is on. transposed: the weight is
  // [in, out]. None if not possible: for a weight that is not a stand-in, and under saved-tensor hooks, because an
  // activation checkpoint inside a block recomputes its part and must find the same ops.
  Gradient linear(const at::Tensor& x, const at::Tensor& weight, const Gradient& bias, bool transposed);
  // Defers other work, run by `compute`. grad: memory that must not change until then.
  void note(at::Tensor grad, std::function<void(Leaves&)> work);
  // Computes the deferred gradients.
  void compute();
  // Discards them.
  void clear() { notes_.clear(); }

 private:
  struct Note {
    at::Tensor grad;
    std::function<void(Leaves&)> work;
  };
  friend struct DeferredLinear;

  std::shared_ptr<Leaves> leaves_;
  std::vector<Note> notes_;
  int64_t calls_ = 0, skippable_ = -1;
  bool skip_last_ = false;
  at::Tensor last_output_;
};

// One call of a function, whose backward pass runs when its gradients have arrived. Holds edges of the graph,
// but no tensors.
class Piece {
 public:
  // leaves: sum the gradients of their stand-ins, as shares or whole; several may be given. Without any,
  // gradients accumulate in the parameters, with all hooks.
  Piece(std::vector<std::shared_ptr<Leaves>> leaves, bool whole)
      : leaves_(std::move(leaves)), whole_(whole) {}

  // The input to pass to the function.
  at::Tensor input(const at::Tensor& data);
  // The detached result. overwritten: its memory will be overwritten, so autograd must refuse to read it.
  at::Tensor output(const at::Tensor& result, bool overwritten);
  // Gradients of the inputs, given those of the outputs; undefined for inputs that no output depends on.
  // Frees the graph. fresh: in memory of their own, which callers may overwrite.
  std::vector<Gradient> backward(const std::vector<Gradient>& gradients, bool fresh);

 private:
  std::vector<std::shared_ptr<Leaves>> leaves_;
  bool whole_;
  torch::autograd::edge_list sources_, roots_;
  std::vector<c10::intrusive_ptr<torch::CustomClassHolder>> slots_;
};

// Value that changes whenever the generator draws.
uint64_t generator_mark(const at::Generator& generator);

}  // namespace oases
