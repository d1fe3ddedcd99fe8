#include "quantized_backend.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "device_work.h"
#include "quantize_kernels.h"
#include "quantized_blocks.h"
#include "rounding_errors.h"

namespace oases {
namespace {

// Numbers of a piece of an all-reduce: while one is on the wire, the next is quantised.
constexpr int64_t kPiece = 1 << 20;

void check_numbers(const char* op, const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, op,
                    " of quantised numbers takes float32, float16 and bfloat16, got ", type,
                    "; convert the tensor, or leave out the wire dtype");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": the tensor of shape ", tensor.sizes(),
                    " is not contiguous");
}

// Flat, in fp32: a copy, or a view of the tensor.
at::Tensor in_float(const at::Tensor& tensor) { return tensor.view(-1).to(at::kFloat); }

// Calls `run` with flat fp32 memory for `output`, and copies it there.
template <typename Run>
void into(const at::Tensor& output, const Run& run) {
  const at::Tensor flat = output.view(-1);
  if (flat.scalar_type() == at::kFloat) return run(flat);
  const at::Tensor result = at::empty(flat.sizes(), flat.options().dtype(at::kFloat));
  run(result);
  flat.copy_(result);
}

void require_sum(const char* op, const c10d::ReduceOp& reduce) {
  TORCH_CHECK_VALUE(reduce == c10d::ReduceOp::SUM, op,
                    " of quantised numbers sums; no other operation is available");
}

at::Tensor buffer(int64_t size, const at::Tensor& like) {
  return at::empty({size}, like.options().dtype(at::kByte));
}

}  // namespace

QuantizedBackend::QuantizedBackend(c10::intrusive_ptr<c10d::Backend> on_cpu,
                                   c10::intrusive_ptr<c10d::Backend> on_device)
    : Backend((on_cpu ? on_cpu : on_device)->getRank(), (on_cpu ? on_cpu : on_device)->getSize()),
      on_cpu_(std::move(on_cpu)),
      on_device_(std::move(on_device)) {}

c10d::Backend& QuantizedBackend::inner(const at::Tensor& tensor) const {
  return *(tensor.is_cpu() ? on_cpu_ : on_device_);  // c10d gives it those of its devices alone
}

QuantizedBackend::Work QuantizedBackend::exchange(at::Tensor& received, at::Tensor& sent) {
  bytes_sent_ += sent.numel() / getSize() * (getSize() - 1);
  std::vector<int64_t> equal;
  return inner(received).alltoall_base(received, sent, equal, equal, {});
}

// A piece of an all-reduce: `part` numbers for each rank, the last ranks' perhaps fewer or none.
struct QuantizedBackend::Piece {
  Piece(const at::Tensor& whole, int64_t first, int64_t n, int size)
      : data(whole.narrow(0, first, n)),
        n(n),
        first(first),
        part((quantized_blocks(n) + size - 1) / size * kQuantizedBlock),
        stride(packed_bytes(part)) {}

  int64_t from(int rank) const { return std::min(n, rank * part); }
  int64_t count(int rank) const { return std::min(n, (rank + 1) * part) - from(rank); }
  at::Tensor of(int rank) const { return data.narrow(0, from(rank), count(rank)); }
  at::Tensor packed(const at::Tensor& all, int rank) const { return all.narrow(0, rank * stride, stride); }

  at::Tensor data;
  int64_t n, first, part, stride;
  at::Tensor sent, received;
  Work work;
};

// in_bf16: the same by the inner backend, for layers of which the errors stay too large; null for what none exempts.
QuantizedBackend::Work QuantizedBackend::enqueue(c10d::OpType type, Tensors outputs, const Run& run,
                                                 const Run& in_bf16) {
  ++calls_;
  if (!outputs.front().is_cpu()) return on_stream(type, std::move(outputs), run, in_bf16);
  return worker_.enqueue(
      getRank(), type, std::move(outputs),
      [this, type, run, in_bf16, layer = layer_of(std::exchange(label_, ""))](LocalWork& work) {
        LayerErrors& errors = errors_of(layers_, type, layer);
        Rounding rounding;
        work.exempt = in_bf16 && errors.exempt;
        if (work.exempt) return in_bf16(rounding);
        rounding.measured = errors.above > 0 || errors.due();
        ++errors.calls;
        run(rounding);
        if (!rounding.measured) return;
        Tensors both{rounding.both(work.result().front())};
        on_cpu_->allreduce(both)->wait();
        errors.judge(layer, in_bf16 != nullptr, both.front(), work);
      });
}

// Queues all steps on the backend's own stream, after what the caller's has queued.
QuantizedBackend::Work QuantizedBackend::on_stream(c10d::OpType type, Tensors outputs, const Run& run,
                                                   const Run& in_bf16) {
  const c10::Device device = outputs.front().device();
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!stream_ || stream_->device() != device) stream_ = guard.getNewStream(device);
  c10::Event ready(device.type());
  ready.record(guard.getStream(device));
  const c10::StreamGuard on(*stream_);
  ready.block(*stream_);
  const std::string layer = layer_of(std::exchange(label_, ""));
  LayerErrors& errors = errors_of(layers_there_, type, layer);
  Judgement found;
  if (errors.sample && errors.due()) {  // of so many calls ago, on every rank, that the host does not wait
    errors.sample->arrived.synchronize();
    errors.judge(layer, in_bf16 != nullptr, errors.sample->both, found);
    errors.sample.reset();
  }
  std::vector<Work> steps;
  Rounding rounding;
  found.exempt = in_bf16 && errors.exempt;
  rounding.measured = !found.exempt && errors.due();
  rounding.steps = &steps;
  found.exempt ? in_bf16(rounding) : run(rounding);
  ++errors.calls;  // not of one that fails before its first step, which is filled by another
  if (rounding.measured) {
    Tensors both{rounding.both(outputs.front())};
    Work work = on_device_->allreduce(both);
    finish(work, rounding);
    errors.sample.emplace(both.front().to(at::kCPU, /*non_blocking=*/true), c10::Event(device.type()));
    errors.sample->arrived.record(*stream_);
  }
  const auto done = std::make_shared<c10::Event>(device.type());
  done->record(*stream_);
  auto work =
      c10::make_intrusive<StepsWork>(getRank(), type, std::move(outputs), *stream_, done, std::move(steps));
  static_cast<Judgement&>(*work) = found;
  return work;
}

// Waits for a step: the worker's thread, or the backend's stream.
void QuantizedBackend::finish(Work& work, Rounding& rounding) {
  work->wait();
  if (rounding.steps) rounding.steps->push_back(work);
}

void QuantizedBackend::sum(const at::Tensor& data, Rounding& rounding) {
  const int size = getSize(), rank = getRank();
  std::vector<Piece> pieces;
  for (int64_t first = 0; first < data.numel(); first += kPiece)
    pieces.emplace_back(data, first, std::min(kPiece, data.numel() - first), size);
  const auto start = [&](Piece& piece) {
    piece.sent = buffer(size * piece.stride, data), piece.received = buffer(size * piece.stride, data);
    rounding.add_residual(piece.data, piece.first);
    for (int other = 0; other < size; ++other) {
      if (other == rank || piece.count(other) == 0) continue;
      const at::Tensor part = piece.of(other), packed = piece.packed(piece.sent, other);
      blocks::pack(part, packed);
      rounding.note(part, packed, piece.first + piece.from(other));
    }
    piece.work = exchange(piece.received, piece.sent);
  };
  const auto reduce = [&](Piece& piece) {
    finish(piece.work, rounding);
    at::Tensor mine = piece.packed(piece.sent, rank);
    const at::Tensor own = piece.of(rank), parts = piece.received.view({size, piece.stride});
    if (own.numel() > 0 && !rounding.wanted()) {
      blocks::pack(own, mine, parts, rank);
    } else if (own.numel() > 0) {
      blocks::sum(own, parts, rank, own);  // overwritten by the result anyway
      blocks::pack(own, mine);
      rounding.note(own, mine, piece.first + piece.from(rank));
      rounding.note_result(own);
    }
    at::Tensor all = piece.received = buffer(size * piece.stride, data);
    bytes_sent_ += piece.stride * (size - 1);
    piece.work = inner(all)._allgather_base(all, mine);
  };
  const auto end = [&](Piece& piece) {
    finish(piece.work, rounding);
    for (int other = 0; other < size; ++other)
      if (piece.count(other) > 0) blocks::unpack(piece.packed(piece.received, other), piece.of(other));
    piece.sent.reset(), piece.received.reset();
  };
  // In this order on every rank, whatever the time that each step takes.
  const size_t count = pieces.size();
  for (size_t step = 0; step < count + 2; ++step) {
    if (step < count) start(pieces[step]);
    if (step >= 1 && step - 1 < count) reduce(pieces[step - 1]);
    if (step >= 2) end(pieces[step - 2]);
  }
}

QuantizedBackend::Work QuantizedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  require_sum("all_reduce", options.reduceOp);
  TORCH_CHECK_VALUE(tensors.size() == 1 || tensors.size() == 2,
                    "all_reduce of quantised numbers takes one tensor, and perhaps its residual, got ",
                    tensors.size());
  const at::Tensor tensor = tensors.front();
  check_numbers("all_reduce", tensor);
  at::Tensor residual;
  if (tensors.size() == 2) {
    residual = tensors.back();
    TORCH_CHECK_VALUE(residual.scalar_type() == at::kFloat && residual.device() == tensor.device() &&
                          residual.is_contiguous() && residual.sizes() == tensor.sizes(),
                      "all_reduce of quantised numbers: the residual must be float32 of the shape ",
                      tensor.sizes(), ", got ", residual.scalar_type(), " of ", residual.sizes(), " on ",
                      residual.device(), "; the tensor is on ", tensor.device());
  }
  const Run run = [this, tensor, residual](Rounding& rounding) {
    if (residual.defined()) rounding.residual = residual.view(-1);
    const at::Tensor data = in_float(tensor);
    sum(data, rounding);
    if (data.data_ptr() != tensor.data_ptr()) tensor.view(-1).copy_(data);
  };
  if (residual.defined())
    return enqueue(c10d::OpType::ALLREDUCE, {tensor}, run);  // what it loses is sent later
  return enqueue(c10d::OpType::ALLREDUCE, {tensor}, run, [this, tensor](Rounding& rounding) {
    Tensors sent{tensor.view(-1).to(at::kBFloat16)};
    Work work = inner(tensor).allreduce(sent);
    finish(work, rounding);
    tensor.view(-1).copy_(sent.front());
  });
}

QuantizedBackend::Work QuantizedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::AllgatherOptions&) {
  check_numbers("all_gather", output), check_numbers("all_gather", input);
  return enqueue(c10d::OpType::_ALLGATHER_BASE, {output}, [this, output, input](Rounding& rounding) {
    const int64_t n = input.numel(), stride = packed_bytes(n);
    at::Tensor mine = buffer(stride, input), all = buffer(stride * getSize(), input);
    const at::Tensor data = in_float(input);
    blocks::pack(data, mine);
    rounding.note(data, mine, 0);
    rounding.note_result(data);
    bytes_sent_ += stride * (getSize() - 1);
    Work work = inner(all)._allgather_base(all, mine);
    finish(work, rounding);
    into(output, [&](const at::Tensor& result) {
      for (int rank = 0; rank < getSize(); ++rank)
        blocks::unpack(all.narrow(0, rank * stride, stride), result.narrow(0, rank * n, n));
    });
  });
}

QuantizedBackend::Work QuantizedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::ReduceScatterOptions& options) {
  require_sum("reduce_scatter", options.reduceOp);
  check_numbers("reduce_scatter", output), check_numbers("reduce_scatter", input);
  const Run run = [this, output, input](Rounding& rounding) {
    const int64_t n = output.numel(), stride = packed_bytes(n);
    at::Tensor sent = buffer(stride * getSize(), input), received = buffer(stride * getSize(), input),
               data = in_float(input);
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) continue;
      const at::Tensor part = data.narrow(0, rank * n, n), packed = sent.narrow(0, rank * stride, stride);
      blocks::pack(part, packed);
      rounding.note(part, packed, rank * n);
    }
    Work work = exchange(received, sent);
    finish(work, rounding);
    into(output, [&](const at::Tensor& result) {
      blocks::sum(data.narrow(0, getRank() * n, n), received.view({getSize(), stride}), getRank(), result);
      rounding.note_result(result);
    });
  };
  return enqueue(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, run,
                 [this, output, input](Rounding& rounding) {
                   at::Tensor sent = input.view(-1).to(at::kBFloat16),
                              mine = at::empty({output.numel()}, sent.options());
                   Work work = inner(input)._reduce_scatter_base(mine, sent);
                   finish(work, rounding);
                   output.view(-1).copy_(mine);
                 });
}

QuantizedBackend::Work QuantizedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                       std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits,
                                                       const c10d::AllToAllOptions&) {
  check_numbers("all_to_all", output), check_numbers("all_to_all", input);
  c10d::checkSplitSizes(output_splits, output, getSize());
  c10d::checkSplitSizes(input_splits, input, getSize());
  // In numbers; torch gives none for equal parts, and otherwise rows.
  const auto parts_of = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    if (splits.empty()) return std::vector<int64_t>(getSize(), tensor.numel() / getSize());
    const int64_t row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
    std::vector<int64_t> parts;
    for (const int64_t rows : splits) parts.push_back(rows * row);
    return parts;
  };
  const auto received_parts = parts_of(output, output_splits), sent_parts = parts_of(input, input_splits);
  return enqueue(c10d::OpType::ALLTOALL_BASE, {output}, [=, this](Rounding& rounding) {
    const auto sizes_of = [&](const std::vector<int64_t>& parts) {
      std::vector<int64_t> sizes;
      for (const int64_t part : parts) sizes.push_back(packed_bytes(part));
      sizes[getRank()] = 0;  // copied
      return sizes;
    };
    auto sent_bytes = sizes_of(sent_parts), received_bytes = sizes_of(received_parts);
    const auto total = [](const std::vector<int64_t>& sizes) {
      return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    };
    at::Tensor sent = buffer(total(sent_bytes), input), received = buffer(total(received_bytes), input),
               data = in_float(input);
    int64_t number = 0, byte = 0, own = 0;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) {
        own = number;
      } else {
        const at::Tensor part = data.narrow(0, number, sent_parts[rank]),
                         packed = sent.narrow(0, byte, sent_bytes[rank]);
        blocks::pack(part, packed);
        rounding.note(part, packed, number);
        rounding.note_result(part);
      }
      number += sent_parts[rank], byte += sent_bytes[rank];
    }
    bytes_sent_ += sent.numel();
    auto counts = received_bytes;  // gloo takes the vectors that it is given
    Work work = inner(received).alltoall_base(received, sent, counts, sent_bytes, {});
    finish(work, rounding);
    into(output, [&](const at::Tensor& result) {
      int64_t at = 0, from = 0;
      for (int rank = 0; rank < getSize(); ++rank) {
        const at::Tensor part = result.narrow(0, at, received_parts[rank]);
        if (rank == getRank())
          at::Tensor(part).copy_(data.narrow(0, own, sent_parts[rank]));
        else
          blocks::unpack(received.narrow(0, from, received_bytes[rank]), part);
        at += received_parts[rank], from += received_bytes[rank];
      }
    });
  });
}

QuantizedBackend::Work QuantizedBackend::barrier(const c10d::BarrierOptions& options) {
  return worker_.enqueue(getRank(), c10d::OpType::BARRIER, {}, [this, options](LocalWork&) {
    (on_cpu_ ? on_cpu_ : on_device_)->barrier(options)->wait();
  });
}

}  // namespace oases
