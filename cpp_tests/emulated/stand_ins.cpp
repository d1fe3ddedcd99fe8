// CUDA launchers in place of their CPU twins: loaded before oases._C with RTLD_GLOBAL, these are what its ops
// call for tensors on the CPU. Arguments lie in checked memory meanwhile, and the twin runs beside: results
// that differ by more than roundings are a fault.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "bitmap_kernels.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "machine.h"
#include "permute_kernels.h"
#include "sketch_kernels.h"

namespace {

using emulated::Kind;
using oases::DType;

// Calls by launcher; written to the file $OASES_EMULATED_CALLS at the end.
std::map<std::string, int> calls;

struct AtExit {
  ~AtExit() {
    const char* path = std::getenv("OASES_EMULATED_CALLS");
    FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    for (const auto& [name, count] : calls) std::fprintf(file, "%s %d\n", name.c_str(), count);
    std::fclose(file);
  }
} at_exit;

void* twin_of(void* stand_in) {
  static void* const core = [] {
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
          if (std::strstr(info->dlpi_name, "/_C.")) *static_cast<std::string*>(to) = info->dlpi_name;
          return 0;
        },
        &path);
    return dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW);
  }();
  Dl_info info;
  void* twin = core && dladdr(stand_in, &info) && info.dli_sname ? dlsym(core, info.dli_sname) : nullptr;
  if (!twin || twin == stand_in)
    throw std::runtime_error("emulated: oases._C has no CPU twin of this kernel");
  return twin;
}

// The CPU's function of the name and type of `stand_in`.
template <auto stand_in>
auto twin() {
  static const auto found = reinterpret_cast<decltype(stand_in)>(twin_of(reinterpret_cast<void*>(stand_in)));
  return found;
}

int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

double number(DType dtype, const void* from, int64_t i) {
  const auto* half = static_cast<const unsigned short*>(from);
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(from)[i];
    case DType::f16:
      return __half2float({half[i]});
    case DType::bf16:
      return __bfloat162float({half[i]});
  }
  return 0;
}

// One call of a launcher: places its arguments, and compares its outputs with those of the twin.
class Call {
 public:
  explicit Call(const char* name) : lock_(mutex()), name_(name) { ++calls[name]; }
  ~Call() { emulated::forget(); }

  template <typename T>
  const T* in(const T* from, int64_t count, int64_t size = sizeof(T)) {
    return static_cast<const T*>(emulated::place(const_cast<T*>(from), count * size, size, Kind::input));
  }
  const void* in(const void* from, int64_t count, DType dtype) {
    return emulated::place(const_cast<void*>(from), count * size_of(dtype), size_of(dtype), Kind::input);
  }
  // An output that the twin computes, too, into what `twin` then gives.
  void* out(void* to, int64_t count, DType dtype, Kind kind = Kind::output) {
    return add(to, count, size_of(dtype), static_cast<int>(dtype), kind);
  }
  float* out(float* to, int64_t count, Kind kind = Kind::output) {
    return static_cast<float*>(add(to, count, 4, 0, kind));
  }
  int64_t* out(int64_t* to, int64_t count, Kind kind = Kind::output) {
    return static_cast<int64_t*>(add(to, count, 8, -1, kind));
  }
  uint8_t* out(uint8_t* to, int64_t count) {
    return static_cast<uint8_t*>(add(to, count, 1, -1, Kind::output));
  }
  template <typename T>
  T* twin(T* to) {
    for (Output& output : outputs_)
      if (output.to == to) return reinterpret_cast<T*>(output.twin.data());
    return nullptr;
  }

  void end(double tolerance = 0) {
    emulated::finish(name_);
    for (const Output& output : outputs_)
      output.type < 0 ? compare_bytes(output) : compare_numbers(output, tolerance);
  }

 private:
  struct Output {
    void* to;
    int64_t count, size;
    int type;
    std::vector<unsigned char> twin;
  };

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

  void* add(void* to, int64_t count, int64_t size, int type, Kind kind) {
    if (!to) return nullptr;
    auto* const bytes = static_cast<unsigned char*>(to);
    outputs_.push_back({to, count, size, type, std::vector<unsigned char>(bytes, bytes + count * size)});
    return emulated::place(to, count * size, size, kind);
  }

  [[noreturn]] void differ(const Output& output, int64_t at, const std::string& values) const {
    throw std::runtime_error(std::string("emulated: ") + name_ + ": number " + std::to_string(at) + " of " +
                             std::to_string(output.count) + " differs from the CPU's: " + values);
  }

  void compare_bytes(const Output& output) const {
    const auto* ours = static_cast<const unsigned char*>(output.to);
    for (int64_t i = 0; i < output.count * output.size; ++i)
      if (ours[i] != output.twin[i]) differ(output, i / output.size, "bytes");
  }

  void compare_numbers(const Output& output, double tolerance) const {
    const auto type = static_cast<DType>(output.type);
    const double rounding = type == DType::f32 ? 1e-5 : type == DType::f16 ? 2e-3 : 1.6e-2;
    double largest = 1;
    for (int64_t i = 0; i < output.count; ++i) {
      const double value = std::fabs(number(type, output.twin.data(), i));
      if (std::isfinite(value)) largest = std::max(largest, value);
    }
    for (int64_t i = 0; i < output.count; ++i) {
      const double a = number(type, output.to, i), b = number(type, output.twin.data(), i);
      if (a == b || (std::isnan(a) && std::isnan(b))) continue;
      if (!(std::fabs(a - b) <= (tolerance ? tolerance * rounding : 0) * largest))
        differ(output, i, std::to_string(a) + " and " + std::to_string(b));
    }
  }

  std::lock_guard<std::mutex> lock_;
  const char* name_;
  std::vector<Output> outputs_;
};

}  // namespace

namespace oases::cpu {

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

void swiglu(DType dtype, int64_t rows, int64_t n, const void* x, void* out) {
  Call call("swiglu");
  cuda::swiglu(dtype, rows, n, call.in(x, rows * 2 * n, dtype), call.out(out, rows * n, dtype), nullptr);
  twin<&swiglu>()(dtype, rows, n, x, call.twin(out));
  call.end(1);
}

void swiglu_backward(DType dtype, int64_t rows, int64_t n, const void* grad, const void* x, void* grad_x) {
  Call call("swiglu_backward");
  cuda::swiglu_backward(dtype, rows, n, call.in(grad, rows * n, dtype), call.in(x, rows * 2 * n, dtype),
                        call.out(grad_x, rows * 2 * n, dtype), nullptr);
  twin<&swiglu_backward>()(dtype, rows, n, grad, x, call.twin(grad_x));
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

}  // namespace oases::cpu
