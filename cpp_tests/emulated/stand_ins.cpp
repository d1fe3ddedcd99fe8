// CUDA launchers in place of their CPU twins: loaded before oases._C with RTLD_GLOBAL, these are what its ops
// call for tensors on the CPU. Arguments lie in checked memory meanwhile, and the twin runs beside: results
// that differ by more than roundings are a fault.
#include <numeric>

#include "bitmap_kernels.h"
#include "call.h"
#include "permute_kernels.h"
#include "quantize_kernels.h"
#include "sketch_kernels.h"

namespace oases::cpu {

using emulated::Call;
using emulated::Kind;
using emulated::twin;

void norm_forward(const NormEpilogue& e, const NormForward& t) {
  Call call("norm_forward");
  const int64_t all = e.rows * e.n;
  cuda::norm_forward(e,
                     {call.in(t.y, all, e.dtype), call.in(t.x, all, e.dtype), call.in(t.bias, e.n, e.dtype),
                      call.in(t.weight, e.n, e.dtype), call.in(t.norm_bias, e.n, e.dtype),
                      call.out(t.out, all, e.dtype), call.out(t.h, all, e.dtype),
                      e.norm == Norm::layer ? call.out(t.mean, e.rows) : nullptr, call.out(t.rstd, e.rows)},
                     nullptr);
  twin<&norm_forward>()(e, {t.y, t.x, t.bias, t.weight, t.norm_bias, call.twin(t.out), call.twin(t.h),
                            call.twin(t.mean), call.twin(t.rstd)});
  call.end(4);
}

int64_t norm_backward_blocks(const NormEpilogue& e, const NormBackward& t) {
  return cuda::norm_backward_blocks(e, t);
}

void norm_backward(const NormEpilogue& e, const NormBackward& t) {
  Call call("norm_backward");
  const int64_t all = e.rows * e.n, sums = 1 + !!t.grad_norm_bias + !!t.grad_bias;
  std::vector<float> partials(t.blocks * sums * e.n);
  // Scratch need not be whole where there are fewer rows than blocks, but must not be read before it is.
  cuda::norm_backward(
      e,
      {call.in(t.grad_out, all, e.dtype), call.in(t.grad_h, all, e.dtype), call.in(t.out, all, e.dtype),
       call.in(t.weight, e.n, e.dtype), call.in(t.mean, e.norm == Norm::layer ? e.rows : 0),
       call.in(t.rstd, e.rows), call.out(t.grad_y, all, e.dtype), call.out(t.grad_x, all, e.dtype),
       static_cast<float*>(emulated::place(t.partials, partials.size() * 4, 4, Kind::output)), t.blocks,
       call.out(t.grad_weight, e.n, e.dtype), call.out(t.grad_bias, e.n, e.dtype),
       call.out(t.grad_norm_bias, e.n, e.dtype)},
      nullptr);
  NormBackward other = t;
  other.grad_y = call.twin(t.grad_y), other.grad_x = call.twin(t.grad_x);
  other.grad_weight = call.twin(t.grad_weight), other.grad_bias = call.twin(t.grad_bias);
  other.grad_norm_bias = call.twin(t.grad_norm_bias);
  other.blocks = twin<&norm_backward_blocks>()(e, other);
  partials.resize(other.blocks * sums * e.n);
  other.partials = partials.data();
  twin<&norm_backward>()(e, other);
  call.end(8);
}

void gelu(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* x, const void* bias, void* out) {
  Call call("gelu");
  cuda::gelu(dtype, kind, rows, n, call.in(x, rows * n, dtype), call.in(bias, n, dtype),
             call.out(out, rows * n, dtype), nullptr);
  twin<&gelu>()(dtype, kind, rows, n, x, bias, call.twin(out));
  call.end(1);
}

int64_t gelu_backward_blocks(DType dtype, int64_t rows, int64_t n) {
  return cuda::gelu_backward_blocks(dtype, rows, n);
}

void gelu_backward(DType dtype, Gelu kind, int64_t rows, int64_t n, const void* grad, const void* x,
                   const void* bias, void* grad_x, float* partials, void* grad_bias) {
  Call call("gelu_backward");
  const int64_t blocks = gelu_backward_blocks(dtype, rows, n);
  cuda::gelu_backward(dtype, kind, rows, n, call.in(grad, rows * n, dtype), call.in(x, rows * n, dtype),
                      call.in(bias, n, dtype), call.out(grad_x, rows * n, dtype),
                      static_cast<float*>(emulated::place(partials, blocks * n * 4, 4, Kind::output)),
                      call.out(grad_bias, n, dtype), nullptr);
  std::vector<float> scratch(twin<&gelu_backward_blocks>()(dtype, rows, n) * n);
  twin<&gelu_backward>()(dtype, kind, rows, n, grad, x, bias, call.twin(grad_x), scratch.data(),
                         call.twin(grad_bias));
  call.end(8);
}

void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, const void* up, void* out) {
  Call call("swiglu");
  cuda::swiglu(dtype, rows, n, call.in(x, rows * (up ? 1 : 2) * n, dtype), call.in(up, rows * n, dtype),
               call.out(out, rows * n, dtype), nullptr);
  twin<&swiglu>()(dtype, rows, n, x, up, call.twin(out));
  call.end(1);
}

void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, const void* up,
                     void* grad_x, void* grad_up) {
  Call call("swiglu_backward");
  const int64_t count = rows * (up ? 1 : 2) * n;
  cuda::swiglu_backward(dtype, rows, n, call.in(grad, rows * n, dtype), call.in(x, count, dtype),
                        call.in(up, rows * n, dtype), call.out(grad_x, count, dtype),
                        call.out(grad_up, rows * n, dtype), nullptr);
  twin<&swiglu_backward>()(dtype, rows, n, grad, x, up, call.twin(grad_x), call.twin(grad_up));
  call.end(2);
}

void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits) {
  Call call("bitmap_pack");
  cuda::bitmap_pack(call.in(x, rows * n, dtype), dtype, rows, n, call.out(bits, bitmap_bytes(rows)), nullptr);
  twin<&bitmap_pack>()(x, dtype, rows, n, call.twin(bits));
  call.end();
}

void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts) {
  Call call("bitmap_count");
  cuda::bitmap_count(call.in(bits, bitmap_bytes(rows)), rows, call.out(counts, bitmap_tiles(rows)), nullptr);
  twin<&bitmap_count>()(bits, rows, call.twin(counts));
  call.end();
}

void bitmap_list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                 int64_t* indices) {
  Call call("bitmap_list");
  const int64_t tiles = bitmap_tiles(rows);
  cuda::bitmap_list(call.in(bits, bitmap_bytes(rows)), rows, call.in(counts, tiles), call.in(ends, tiles),
                    call.out(indices, tiles ? ends[tiles - 1] : 0), nullptr);
  twin<&bitmap_list>()(bits, rows, counts, ends, call.twin(indices));
  call.end();
}

void count_experts(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets, int64_t* counts,
                   int64_t* first_bad) {
  Call call("count_experts");
  cuda::count_experts(call.in(ids, slots), slots, experts, call.out(tile_offsets, experts * tiles_of(slots)),
                      call.out(counts, experts), call.out(first_bad, 1, Kind::both), nullptr);
  twin<&count_experts>()(ids, slots, experts, call.twin(tile_offsets), call.twin(counts),
                         call.twin(first_bad));
  call.end();
}

void place_slots(const int64_t* ids, int64_t slots, int64_t experts, int64_t* tile_offsets,
                 const int64_t* counts, int64_t* bases, int64_t* source) {
  Call call("place_slots");
  // What is left in the scratch is nobody's business: the twin's may differ.
  const int64_t tiles = tiles_of(slots);
  std::vector<int64_t> offsets(tile_offsets, tile_offsets + experts * tiles), scratch(experts + 1);
  cuda::place_slots(call.in(ids, slots), slots, experts,
                    static_cast<int64_t*>(emulated::place(tile_offsets, experts * tiles * 8, 8, Kind::both)),
                    call.in(counts, experts),
                    static_cast<int64_t*>(emulated::place(bases, (experts + 1) * 8, 8, Kind::output)),
                    call.out(source, slots), nullptr);
  twin<&place_slots>()(ids, slots, experts, offsets.data(), counts, scratch.data(), call.twin(source));
  call.end();
}

void gather_rows(const void* x, const int64_t* source, int64_t k, int64_t rows, int64_t row_bytes,
                 void* out) {
  Call call("gather_rows");
  const int64_t tokens = k ? rows / k : 0, numbers = row_bytes / 2;
  cuda::gather_rows(call.in(x, tokens * numbers, DType::bf16), call.in(source, rows), k, rows, row_bytes,
                    call.out(out, rows * numbers, DType::bf16), nullptr);
  twin<&gather_rows>()(x, source, k, rows, row_bytes, call.twin(out));
  call.end();
}

void invert(const int64_t* source, int64_t slots, int64_t* inverse) {
  Call call("invert");
  cuda::invert(call.in(source, slots), slots, call.out(inverse, slots), nullptr);
  // A source that names a slot twice leaves either: the ops refuse it.
  twin<&invert>()(source, slots, call.twin(inverse));
  call.end();
}

void combine_rows(const void* rows, const int64_t* inverse, const void* weights, DType dtype,
                  DType weights_dtype, int64_t tokens, int64_t k, int64_t n, void* out) {
  Call call("combine_rows");
  cuda::combine_rows(call.in(rows, tokens * k * n, dtype), call.in(inverse, tokens * k),
                     call.in(weights, tokens * k, weights_dtype), dtype, weights_dtype, tokens, k, n,
                     call.out(out, tokens * n, dtype), nullptr);
  twin<&combine_rows>()(rows, inverse, weights, dtype, weights_dtype, tokens, k, n, call.twin(out));
  call.end(1);
}

void combine_rows_backward(const void* grad, const void* rows, const int64_t* source, const void* weights,
                           DType dtype, DType weights_dtype, int64_t slots, int64_t k, int64_t n,
                           void* grad_rows, void* grad_weights) {
  Call call("combine_rows_backward");
  cuda::combine_rows_backward(call.in(grad, slots / k * n, dtype), call.in(rows, slots * n, dtype),
                              call.in(source, slots), call.in(weights, slots, weights_dtype), dtype,
                              weights_dtype, slots, k, n, call.out(grad_rows, slots * n, dtype),
                              call.out(grad_weights, slots, weights_dtype, Kind::both), nullptr);
  twin<&combine_rows_backward>()(grad, rows, source, weights, dtype, weights_dtype, slots, k, n,
                                 call.twin(grad_rows), call.twin(grad_weights));
  call.end(4);
}

void sketch_cells(const int64_t* keys, int64_t m, SketchShape shape, int64_t* cells) {
  Call call("sketch_cells");
  cuda::sketch_cells(call.in(keys, m), m, shape, call.out(cells, m * shape.rows), nullptr);
  twin<&sketch_cells>()(keys, m, shape, call.twin(cells));
  call.end();
}

// CUDA's wants the cells sorted, which its op does.
void sketch_encode(const int64_t* keys, const float* values, int64_t m, SketchShape shape, bool with_signs,
                   const int64_t*, const int64_t*, float* table) {
  std::vector<int64_t> cells(m * shape.rows), order(cells.size()), sorted(cells.size());
  sketch_cells(keys, m, shape, cells.data());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cells[a] < cells[b]; });
  std::transform(order.begin(), order.end(), sorted.begin(), [&](int64_t i) { return cells[i]; });
  Call call("sketch_encode");
  const int64_t entries = m * shape.rows;
  cuda::sketch_encode(call.in(keys, m), call.in(values, m * shape.n), m, shape, with_signs,
                      call.in(sorted.data(), entries), call.in(order.data(), entries),
                      call.out(table, shape.rows * shape.columns * shape.n, Kind::both), nullptr);
  twin<&sketch_encode>()(keys, values, m, shape, with_signs, nullptr, nullptr, call.twin(table));
  call.end();
}

void sketch_decode(const float* table, const int64_t* keys, int64_t m, SketchShape shape, float* values) {
  Call call("sketch_decode");
  cuda::sketch_decode(call.in(table, shape.rows * shape.columns * shape.n), call.in(keys, m), m, shape,
                      call.out(values, m * shape.n), nullptr);
  twin<&sketch_decode>()(table, keys, m, shape, call.twin(values));
  call.end();
}

void quantize_sum(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride,
                  int64_t n, uint8_t* packed) {
  Call call("quantize_sum");
  cuda::quantize_sum(call.in(x, n), call.in(parts, count * stride), count, skip, stride, n,
                     call.out(packed, packed_bytes(n)), nullptr);
  twin<&quantize_sum>()(x, parts, count, skip, stride, n, call.twin(packed));
  call.end();
}

void sum_parts(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride, int64_t n,
               float* out) {
  Call call("sum_parts");
  cuda::sum_parts(call.in(x, n), call.in(parts, count * stride), count, skip, stride, n, call.out(out, n),
                  nullptr);
  twin<&sum_parts>()(x, parts, count, skip, stride, n, call.twin(out));
  call.end();
}

void dequantize(const uint8_t* packed, int64_t n, float* out) {
  Call call("dequantize");
  cuda::dequantize(call.in(packed, packed_bytes(n)), n, call.out(out, n), nullptr);
  twin<&dequantize>()(packed, n, call.twin(out));
  call.end();
}

}  // namespace oases::cpu
