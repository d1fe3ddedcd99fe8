// Pieces of a step's autograd graph, cut where a schedule has ops of its own, and the gradients that they
// leave.
//
// A schedule runs the backward pass op by op. So every op that a schedule names records a graph of its own:
// it begins at sources, which are its inputs, ends at one or several roots, and reads parameters through
// stand-ins (detached, sharing memory), whose gradients are summed here and not in the parameters: hooks of
// those fire once, later.
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

// Stand-ins of some tensors, and two sums of gradients for each: `share` of what comes before a sum over the
// ranks, `whole` of what comes after it.
class Leaves {
 public:
  explicit Leaves(const std::vector<at::Tensor>& originals);

  const std::vector<at::Tensor>& stand_ins() const { return stand_ins_; }
  bool holds(const at::Tensor& tensor) const { return numbers_.count(tensor.unsafeGetTensorImpl()) > 0; }
  // Adds to the sum of a stand-in, in memory of its own and in the type that its gradient has.
  void add(const at::Tensor& stand_in, at::Tensor gradient, bool whole);
  // The same of rows^T @ columns, inside of the matmul where that can be.
  void add_matmul(const at::Tensor& stand_in, const at::Tensor& rows, const at::Tensor& columns);
  // The sums so far, by stand-in, which are then forgotten.
  std::vector<Gradient> take(bool whole);

 private:
  Gradient& sum_of(const at::Tensor& stand_in, bool whole);

  std::vector<at::Tensor> stand_ins_;
  std::unordered_map<c10::TensorImpl*, size_t> numbers_;
  std::vector<Gradient> shares_, wholes_;
};

// Weight gradients that a piece's backward pass leaves out, for an op W to compute (zero-bubble style).
class DeferredGradients : public torch::CustomClassHolder {
 public:
  explicit DeferredGradients(std::shared_ptr<Leaves> leaves) : leaves_(std::move(leaves)) {}

  // Whether all are stand-ins; a weight computed from others is autograd's business.
  bool takes(const std::vector<Gradient>& tensors) const;
  // Before a forward pass; skip_last: it may leave out the matmul that makes its result, if that is known.
  void begin(bool skip_last);
  // After it. result: what it made, if its last matmul may be left out the next time.
  void end(const Gradient& result);
  // F.linear whose weight gradient is noted. transposed: the weight is [in, out]. None where it cannot be:
  // for a weight that is none of the stand-ins, under autocast, whose casts are autograd's business, and
  // under hooks on saved tensors: an activation checkpoint inside a block runs its part again elsewhere, and
  // must find the same ops.
  Gradient linear(const at::Tensor& x, const at::Tensor& weight, const Gradient& bias, bool transposed);
  // Notes work of another kind, which is run by `compute`. grad: memory that has to stay as it is until then.
  void note(at::Tensor grad, std::function<void(Leaves&)> work);
  // Computes what was noted.
  void compute();
  // Lets go of it.
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

// One call of some function, whose backward pass can be run when its gradients have come. Holds edges of the
// graph and no tensor at them.
class Piece {
 public:
  // leaves: whose gradients are summed there, as shares or whole; several holders may be given. None at all:
  // they are added to the parameters' own, with all hooks.
  Piece(std::vector<std::shared_ptr<Leaves>> leaves, bool whole)
      : leaves_(std::move(leaves)), whole_(whole) {}

  // The input as the function is to get it.
  at::Tensor input(const at::Tensor& data);
  // The result, cut off. overwritten: others will write over its memory, so autograd must refuse to read it.
  at::Tensor output(const at::Tensor& result, bool overwritten);
  // Gradients of the inputs, for those of the outputs; none for what does not depend on one. Frees the graph.
  // fresh: in memory that nothing else reads, for others to write over.
  std::vector<Gradient> backward(const std::vector<Gradient>& gradients, bool fresh);

 private:
  std::vector<std::shared_ptr<Leaves>> leaves_;
  bool whole_;
  torch::autograd::edge_list sources_, roots_;
  std::vector<c10::intrusive_ptr<torch::CustomClassHolder>> slots_;
};

// A number that changes whenever the generator draws.
uint64_t generator_mark(const at::Generator& generator);

}  // namespace oases
