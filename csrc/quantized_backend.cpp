#include "quantized_backend.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace oases {
namespace {

// Numbers of a piece of an all-reduce: while one is on the wire, the next is quantised.
constexpr int64_t kPiece = 1 << 20;
// The error of one collective in so many of a layer is measured.
constexpr int64_t kSampled = 61;
// Samples in succession above the largest error after which a layer is sent in bf16.
constexpr int kPatience = 3;

// "F 3.1 (stack 0, layer 1, ...)" -> "F 3 (stack 0, layer 1, ...)": all sub-batches of an op, whose errors are alike.
std::string layer_of(const std::string& label) {
  const size_t dot = label.find('.'), open = label.find(" (");
  if (dot == std::string::npos || open == std::string::npos || open < dot) return label;
  return label.substr(0, dot) + label.substr(open);
}

void check_numbers(const char* op, const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, op,
                    " of quantised numbers takes float32, float16 and bfloat16, got ", type,
                    "; convert the tensor, or leave out the wire dtype");
  TORCH_CHECK_VALUE(tensor.is_cpu(), op, " of quantised numbers is available for CPU tensors, got one on ",
                    tensor.device(), "; leave out the wire dtype");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": the tensor of shape ", tensor.sizes(),
                    " is not contiguous");
}

// In fp32: a copy, or the tensor itself.
at::Tensor in_float(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

float* floats_of(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }
uint8_t* packed_at(const at::Tensor& tensor) { return tensor.mutable_data_ptr<uint8_t>(); }

// Calls `run` with fp32 memory for `output`, and copies it there.
template <typename Run>
void into(at::Tensor output, const Run& run) {
  if (output.scalar_type() == at::kFloat) return run(output);
  const at::Tensor result = at::empty(output.sizes(), at::kFloat);
  run(result);
  output.copy_(result);
}

void require_sum(const char* op, const c10d::ReduceOp& reduce) {
  TORCH_CHECK_VALUE(reduce == c10d::ReduceOp::SUM, op,
                    " of quantised numbers sums; no other operation is available");
}

at::Tensor buffer(int64_t size) { return at::empty({size}, at::kByte); }

}  // namespace

QuantizedBackend::QuantizedBackend(c10::intrusive_ptr<c10d::Backend> inner, const std::string& wire)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      how_(quantization_called(wire)) {}

QuantizedBackend::Work QuantizedBackend::exchange(at::Tensor& received, at::Tensor& sent) {
  bytes_sent_ += sent.numel() / getSize() * (getSize() - 1);
  std::vector<int64_t> equal;
  return inner_->alltoall_base(received, sent, equal, equal, {});
}

// A piece of an all-reduce: `part` numbers for each rank, the last ranks' perhaps fewer or none.
struct QuantizedBackend::Piece {
  Piece(float* data, int64_t n, int64_t first, int size, Code code)
      : data(data),
        n(n),
        first(first),
        part((quantized_blocks(n) + size - 1) / size * kQuantizedBlock),
        stride(packed_bytes(code, part)) {}

  int64_t from(int rank) const { return std::min(n, rank * part); }
  int64_t count(int rank) const { return std::min(n, (rank + 1) * part) - from(rank); }

  float* data;
  int64_t n, first, part, stride;
  at::Tensor sent, received;
  Work work;
};

// What rounding changes in a collective: kept in `residual` [as the data], if there is one, and measured.
struct QuantizedBackend::Rounding {
  float* residual = nullptr;
  bool measured = false;
  double squares = 0, norm = 0;  // of this rank's errors, and of the results or of what it sent
  std::vector<float> decoded;

  bool wanted() const { return residual || measured; }

  // x [n] was packed; at: place in the data.
  void note(const Quantization& how, const float* x, const uint8_t* packed, int64_t n, int64_t at) {
    if (!wanted()) return;
    decoded.resize(std::max<size_t>(decoded.size(), n));
    cpu::dequantize(how, packed, n, decoded.data());
    for (int64_t i = 0; i < n; ++i) {
      const float error = x[i] - decoded[i];
      squares += static_cast<double>(error) * error;
      if (residual) residual[at + i] = std::isfinite(error) ? error : 0.0f;
    }
  }
  void note_result(const float* x, int64_t n) {
    if (!measured) return;
    for (int64_t i = 0; i < n; ++i) norm += static_cast<double>(x[i]) * x[i];
  }
};

// exemptable: whether large errors send the layer in bf16 from then on.
QuantizedBackend::Work QuantizedBackend::enqueue(c10d::OpType type, Tensors outputs, Run run,
                                                 bool exemptable) {
  Quantization how = how_;
  // Another stream of random numbers for every call and rank.
  how.seed = (++calls_ * 0x9E3779B97F4A7C15u) ^ (static_cast<uint64_t>(getRank()) * 0xD1B54A32D192ED03u);
  return worker_.enqueue(getRank(), type, std::move(outputs),
                         [this, run = std::move(run), how, exemptable,
                          layer = layer_of(std::exchange(label_, ""))](LocalWork& work) {
                           const auto [place, is_new] = errors_.try_emplace(layer);
                           Errors& errors = place->second;
                           if (is_new) errors.place = static_cast<int64_t>(errors_.size()) - 1;
                           Rounding rounding;
                           work.exempt = errors.exempt;
                           rounding.measured =
                               !errors.exempt &&
                               (errors.above > 0 || errors.calls % kSampled == errors.place % kSampled);
                           ++errors.calls;
                           Quantization chosen = how;
                           if (errors.exempt) chosen.code = Code::bf16;
                           run(chosen, rounding);
                           if (rounding.measured) judge(layer, errors, exemptable, rounding, work);
                         });
}

// By the errors of every rank's roundings, as if they were independent.
void QuantizedBackend::judge(const std::string& layer, Errors& errors, bool exemptable,
                             const Rounding& rounding, LocalWork& work) {
  Tensors both{at::tensor({rounding.squares, rounding.norm}, at::kDouble)};
  inner_->allreduce(both)->wait();
  const double squares = both[0][0].item<double>(), norm = both[0][1].item<double>();
  if (!std::isfinite(squares)) return;  // of a NaN or an infinity, which the result shows
  const double error = squares == 0 ? 0.0 : std::sqrt(squares / norm);
  if (std::isfinite(error)) work.relative_error = error;
  errors.above = exemptable && error > kLargestError ? errors.above + 1 : 0;
  if (errors.above < kPatience) return;
  errors.exempt = true;
  work.exempted = layer;
}

void QuantizedBackend::sum(float* data, int64_t n, Quantization how, Rounding& rounding) {
  const int size = getSize(), rank = getRank();
  std::vector<Piece> pieces;
  for (int64_t first = 0; first < n; first += kPiece)
    pieces.emplace_back(data + first, std::min(kPiece, n - first), first, size, how.code);
  const auto start = [&](Piece& piece) {
    piece.sent = buffer(size * piece.stride), piece.received = buffer(size * piece.stride);
    uint8_t* const out = packed_at(piece.sent);
    if (rounding.residual)
      for (int64_t i = 0; i < piece.n; ++i) piece.data[i] += rounding.residual[piece.first + i];
    for (int other = 0; other < size; ++other) {
      const int64_t from = piece.from(other), count = piece.count(other);
      if (other == rank || count == 0) continue;
      uint8_t* const packed = out + other * piece.stride;
      cpu::quantize_sum(how, piece.data + from, nullptr, 0, -1, 0, count, piece.first + from, packed);
      rounding.note(how, piece.data + from, packed, count, piece.first + from);
    }
    piece.work = exchange(piece.received, piece.sent);
  };
  const auto reduce = [&](Piece& piece) {
    piece.work->wait();
    at::Tensor mine = piece.sent.narrow(0, rank * piece.stride, piece.stride);
    const int64_t from = piece.from(rank), own = piece.count(rank);
    Quantization again = how;
    again.seed += 1;
    const uint8_t* const parts = piece.received.const_data_ptr<uint8_t>();
    if (own > 0 && !rounding.wanted()) {
      cpu::quantize_sum(again, piece.data + from, parts, size, rank, piece.stride, own, piece.first + from,
                        packed_at(mine));
    } else if (own > 0) {
      float* const sums = piece.data + from;  // overwritten by the result anyway
      cpu::sum_parts(how, sums, parts, size, rank, piece.stride, own, sums);
      cpu::quantize_sum(again, sums, nullptr, 0, -1, 0, own, piece.first + from, packed_at(mine));
      rounding.note(how, sums, packed_at(mine), own, piece.first + from);
      rounding.note_result(sums, own);
    }
    at::Tensor all = piece.received = buffer(size * piece.stride);
    bytes_sent_ += piece.stride * (size - 1);
    piece.work = inner_->_allgather_base(all, mine);
  };
  const auto finish = [&](Piece& piece) {
    piece.work->wait();
    for (int other = 0; other < size; ++other)
      if (piece.count(other) > 0)
        cpu::dequantize(how, piece.received.const_data_ptr<uint8_t>() + other * piece.stride,
                        piece.count(other), piece.data + piece.from(other));
    piece.sent.reset(), piece.received.reset();
  };
  // In this order on every rank, whatever the time that each step takes.
  const size_t count = pieces.size();
  for (size_t step = 0; step < count + 2; ++step) {
    if (step < count) start(pieces[step]);
    if (step >= 1 && step - 1 < count) reduce(pieces[step - 1]);
    if (step >= 2) finish(pieces[step - 2]);
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
    TORCH_CHECK_VALUE(residual.scalar_type() == at::kFloat && residual.is_cpu() && residual.is_contiguous() &&
                          residual.sizes() == tensor.sizes(),
                      "all_reduce of quantised numbers: the residual must be float32 of the shape ",
                      tensor.sizes(), ", got ", residual.scalar_type(), " of ", residual.sizes());
  }
  return enqueue(
      c10d::OpType::ALLREDUCE, {tensor},
      [this, tensor, residual](Quantization how, Rounding& rounding) {
        rounding.residual = residual.defined() ? floats_of(residual) : nullptr;
        const at::Tensor data = in_float(tensor);
        sum(floats_of(data), data.numel(), how, rounding);
        if (data.data_ptr() != tensor.data_ptr()) at::Tensor(tensor).copy_(data);
      },
      !residual.defined());  // what rounding loses then is sent later
}

QuantizedBackend::Work QuantizedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::AllgatherOptions&) {
  check_numbers("all_gather", output), check_numbers("all_gather", input);
  return enqueue(c10d::OpType::_ALLGATHER_BASE, {output},
                 [this, output, input](Quantization how, Rounding& rounding) {
                   const int64_t n = input.numel(), stride = packed_bytes(how.code, n);
                   at::Tensor mine = buffer(stride), all = buffer(stride * getSize());
                   const at::Tensor data = in_float(input);
                   cpu::quantize_sum(how, floats_of(data), nullptr, 0, -1, 0, n, 0, packed_at(mine));
                   rounding.note(how, floats_of(data), packed_at(mine), n, 0);
                   rounding.note_result(floats_of(data), n);
                   bytes_sent_ += stride * (getSize() - 1);
                   inner_->_allgather_base(all, mine)->wait();
                   into(output, [&](const at::Tensor& result) {
                     for (int rank = 0; rank < getSize(); ++rank)
                       cpu::dequantize(how, packed_at(all) + rank * stride, n, floats_of(result) + rank * n);
                   });
                 });
}

QuantizedBackend::Work QuantizedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::ReduceScatterOptions& options) {
  require_sum("reduce_scatter", options.reduceOp);
  check_numbers("reduce_scatter", output), check_numbers("reduce_scatter", input);
  return enqueue(c10d::OpType::_REDUCE_SCATTER_BASE, {output},
                 [this, output, input](Quantization how, Rounding& rounding) {
                   const int64_t n = output.numel(), stride = packed_bytes(how.code, n);
                   at::Tensor sent = buffer(stride * getSize()), received = buffer(stride * getSize()),
                              data = in_float(input);
                   for (int rank = 0; rank < getSize(); ++rank) {
                     if (rank == getRank()) continue;
                     const float* const part = floats_of(data) + rank * n;
                     uint8_t* const packed = packed_at(sent) + rank * stride;
                     cpu::quantize_sum(how, part, nullptr, 0, -1, 0, n, rank * n, packed);
                     rounding.note(how, part, packed, n, rank * n);
                   }
                   exchange(received, sent)->wait();
                   into(output, [&](const at::Tensor& result) {
                     cpu::sum_parts(how, floats_of(data) + getRank() * n, packed_at(received), getSize(),
                                    getRank(), stride, n, floats_of(result));
                     rounding.note_result(floats_of(result), n);
                   });
                 });
}

QuantizedBackend::Work QuantizedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                       std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits,
                                                       const c10d::AllToAllOptions&) {
  check_numbers("all_to_all", output), check_numbers("all_to_all", input);
  // In numbers; torch gives none for equal parts, and otherwise rows.
  const auto parts_of = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    if (splits.empty()) return std::vector<int64_t>(getSize(), tensor.numel() / getSize());
    const int64_t row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
    std::vector<int64_t> parts;
    for (const int64_t rows : splits) parts.push_back(rows * row);
    return parts;
  };
  const auto received_parts = parts_of(output, output_splits), sent_parts = parts_of(input, input_splits);
  return enqueue(c10d::OpType::ALLTOALL_BASE, {output}, [=, this](Quantization how, Rounding& rounding) {
    const auto sizes_of = [&](const std::vector<int64_t>& parts) {
      std::vector<int64_t> sizes;
      for (const int64_t part : parts) sizes.push_back(packed_bytes(how.code, part));
      sizes[getRank()] = 0;  // copied
      return sizes;
    };
    auto sent_bytes = sizes_of(sent_parts), received_bytes = sizes_of(received_parts);
    const auto total = [](const std::vector<int64_t>& sizes) {
      return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    };
    at::Tensor sent = buffer(total(sent_bytes)), received = buffer(total(received_bytes)),
               data = in_float(input);
    int64_t number = 0, byte = 0, own = 0;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (rank == getRank()) {
        own = number;
      } else {
        const float* const part = floats_of(data) + number;
        cpu::quantize_sum(how, part, nullptr, 0, -1, 0, sent_parts[rank], number, packed_at(sent) + byte);
        rounding.note(how, part, packed_at(sent) + byte, sent_parts[rank], number);
        rounding.note_result(part, sent_parts[rank]);
      }
      number += sent_parts[rank], byte += sent_bytes[rank];
    }
    bytes_sent_ += sent.numel();
    auto counts = received_bytes;  // gloo takes the vectors that it is given
    inner_->alltoall_base(received, sent, counts, sent_bytes, {})->wait();
    into(output, [&](const at::Tensor& result) {
      int64_t at = 0, from = 0;
      for (int rank = 0; rank < getSize(); ++rank) {
        if (rank == getRank())
          std::copy_n(floats_of(data) + own, sent_parts[rank], floats_of(result) + at);
        else
          cpu::dequantize(how, packed_at(received) + from, received_parts[rank], floats_of(result) + at);
        at += received_parts[rank], from += received_bytes[rank];
      }
    });
  });
}

QuantizedBackend::Work QuantizedBackend::barrier(const c10d::BarrierOptions& options) {
  return worker_.enqueue(getRank(), c10d::OpType::BARRIER, {},
                         [this, options](LocalWork&) { inner_->barrier(options)->wait(); });
}

}  // namespace oases
