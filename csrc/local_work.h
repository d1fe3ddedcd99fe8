// c10d Work that this process completes itself.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace oases {

// Of a collective of quantised numbers; read it after the wait. Equal on all ranks. relative_error: where it was sampled,
// on an accelerator that of the sample before. exempt: sent in bf16. layer: of which the errors stayed too large, so that
// it is sent in bf16 from now on, or "".
struct Judgement {
  std::optional<double> relative_error;
  bool exempt = false;
  std::string layer;
};

class LocalWork : public c10d::Work, public Judgement {
 public:
  LocalWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }

  void end(const std::exception_ptr& error) {
    // The future first: callers that return from wait() must find its callbacks done.
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(outputs_));
    finish(error);
  }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace oases
