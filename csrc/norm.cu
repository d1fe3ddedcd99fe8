// Fused epilogue after an all-reduce: bias, dropout, residual and norm in one pass over memory, and its
// backward. A row belongs to a warp if it is short and to a block otherwise; each thread keeps up to `held`
// packs of it in registers; if that does not suffice (held = 0), the row is read again.
#include <type_traits>

#include "device.h"
#include "philox.h"

namespace oases::cuda {
namespace {

// One such block per multiprocessor may use 128 registers per thread; without launch bounds ptxas may spill
// to fit a second.
constexpr int kThreads = 512;
constexpr int kLoopThreads = 256;

// Counts columns: held rows are short, and 64-bit indices would take half the registers.
template <int held>
using Column = std::conditional_t<(held > 0), int, int64_t>;

// Calls f(k, column) for each pack of this thread: k counts held packs.
template <int width, int held, typename F>
__device__ __forceinline__ void each_pack(int64_t n, F f) {
  const auto packs = static_cast<Column<held>>(n / width);
  if constexpr (held > 0) {
#pragma unroll
    for (int k = 0; k < held; ++k) {
      int pack = static_cast<int>(threadIdx.x + k * blockDim.x);
      // Recomputed each time: addresses kept for every pack from row to row would evict the
      // held packs from registers.
      asm volatile("" : "+r"(pack));
      if (pack < packs) f(k, pack * width);
    }
  } else {
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) f(0, pack * width);
  }
}

template <int width>
__device__ __forceinline__ void drop(const Dropout& dropout, int64_t row, int64_t column,
                                     float (&value)[width]) {
  if (!dropout.active()) return;
  if constexpr (width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < width; i += 4) {
      const Words words = dropout.words(row, (column + i) / 4);
      value[i] = dropout.apply(words.a, value[i]);
      value[i + 1] = dropout.apply(words.b, value[i + 1]);
      value[i + 2] = dropout.apply(words.c, value[i + 2]);
      value[i + 3] = dropout.apply(words.d, value[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) value[i] = dropout.apply_at(row, column + i, value[i]);
  }
}

template <typename T>
struct Forward {
  const T *y, *x, *bias, *weight, *norm_bias;
  T *out, *h;
  float *mean, *rstd;
  int64_t rows, n;
  float eps;
  bool layer;
  Dropout dropout;
};

template <typename T, int width, int held>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const Forward<T> a) {
  using P = Pack<T, width>;
  const int64_t stride = int64_t{gridDim.x} * blockDim.y;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < a.rows; row += stride) {
    const int64_t start = row * a.n;
    P kept[held > 0 ? held : 1];
    float sum = 0;
    each_pack<width, held>(a.n, [&](int k, Column<held> column) {
      const P y = P::load(a.y + start + column), x = P::load(a.x + start + column);
      float value[width];
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] = y[i];
      if (a.bias) {
        const P bias = P::load(a.bias + column);
#pragma unroll
        for (int i = 0; i < width; ++i) value[i] += bias[i];
      }
      drop<width>(a.dropout, row, column, value);
      // The norm of `out` as stored, which is what the backward will read.
#pragma unroll
      for (int i = 0; i < width; ++i) {
        kept[k].set(i, value[i] + x[i]);
        sum += kept[k][i];
      }
      kept[k].store(a.out + start + column);
    });
    const auto stored = [&](int k, Column<held> column) {
      return held > 0 ? kept[k] : P::load(a.out + start + column);
    };
    const float mean = a.layer ? sum_over_x(sum) / a.n : 0.0f;
    float squares = 0;
    each_pack<width, held>(a.n, [&](int k, Column<held> column) {
      const P out = stored(k, column);
#pragma unroll
      for (int i = 0; i < width; ++i) squares += (out[i] - mean) * (out[i] - mean);
    });
    const float rstd = rsqrtf(sum_over_x(squares) / a.n + a.eps);
    if (threadIdx.x == 0) {
      if (a.layer) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    each_pack<width, held>(a.n, [&](int k, Column<held> column) {
      const P out = stored(k, column), weight = P::load(a.weight + column);
      float value[width];
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] = (out[i] - mean) * rstd * weight[i];
      if (a.norm_bias) {
        const P bias = P::load(a.norm_bias + column);
#pragma unroll
        for (int i = 0; i < width; ++i) value[i] += bias[i];
      }
      P h;
#pragma unroll
      for (int i = 0; i < width; ++i) h.set(i, value[i]);
      h.store(a.h + start + column);
    });
  }
}

template <typename T>
struct Backward {
  const T *grad_out, *grad_h, *out, *weight;
  const float *mean, *rstd;
  T *grad_y, *grad_x;
  float* partials;
  int64_t rows, n;
  int sums;                             // per column: of weight, then, if needed, norm_bias and bias
  bool layer, norm_bias, bias, shared;  // shared: keep partial sums in shared memory until the last row
  Dropout dropout;
};

template <typename T, int width, int held>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const Backward<T> a) {
  using P = Pack<T, width>;
  float* const shared = shared_memory<float>();
  const auto n = static_cast<Column<held>>(a.n), size = a.sums * n;
  float* const own = a.partials + int64_t{blockIdx.x} * size;
  // Sums of a held row are in shared memory, which the compiler must know to address it cheaply.
  float* const of_weight = held > 0 || a.shared ? shared + threadIdx.y * size : own;
  float* const of_norm_bias = of_weight + n;
  float* const of_bias = of_norm_bias + (a.norm_bias ? n : 0);
  each_pack<width, held>(a.n, [&](int, Column<held> column) {
    for (int sum = 0; sum < a.sums; ++sum) {
      float* const to = of_weight + sum * n + slot<width>(column, n);
#pragma unroll
      for (int i = 0; i < width; ++i) to[place_in_pack<width>(i, n)] = 0.0f;
    }
  });

  const int64_t stride = int64_t{gridDim.x} * blockDim.y;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < a.rows; row += stride) {
    const int64_t start = row * a.n;
    const float mean = a.layer ? a.mean[row] : 0.0f, rstd = a.rstd[row];
    P kept_out[held > 0 ? held : 1], kept_grad[held > 0 ? held : 1];
    float2 both = make_float2(0.0f, 0.0f);  // sums of grad_h * weight, and of that times the normalised row
    if (a.grad_h) {
      each_pack<width, held>(a.n, [&](int k, Column<held> column) {
        const P weight = P::load(a.weight + column);
        kept_out[k] = P::load(a.out + start + column);
        kept_grad[k] = P::load(a.grad_h + start + column);
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const float product = kept_grad[k][i] * weight[i];
          both.x += product;
          both.y += product * (kept_out[k][i] - mean) * rstd;
        }
      });
      both = sum_over_x(both);
    }
    const float along_mean = a.layer ? both.x / a.n : 0.0f, along_row = both.y / a.n;
    each_pack<width, held>(a.n, [&](int k, Column<held> column) {
      float grad[width] = {};
      if (a.grad_h) {
        if constexpr (held == 0) {
          kept_out[k] = P::load(a.out + start + column);
          kept_grad[k] = P::load(a.grad_h + start + column);
        }
        const P weight = P::load(a.weight + column);
        float term[width];
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const float normal = (kept_out[k][i] - mean) * rstd;
          // Rounded before it is subtracted from, as in the mean: a row of one number has no gradient.
          const float product = __fmul_rn(kept_grad[k][i], weight[i]);
          grad[i] = rstd * (product - along_mean - normal * along_row);
          term[i] = kept_grad[k][i] * normal;
        }
        accumulate<width>(of_weight, column, n, term);
        if (a.norm_bias) {
#pragma unroll
          for (int i = 0; i < width; ++i) term[i] = kept_grad[k][i];
          accumulate<width>(of_norm_bias, column, n, term);
        }
      }
      if (a.grad_out) {
        const P past = P::load(a.grad_out + start + column);
#pragma unroll
        for (int i = 0; i < width; ++i) grad[i] += past[i];
      }
      P result;
#pragma unroll
      for (int i = 0; i < width; ++i) result.set(i, grad[i]);
      result.store(a.grad_x + start + column);
      drop<width>(a.dropout, row, column, grad);
      if (a.grad_y) {
#pragma unroll
        for (int i = 0; i < width; ++i) result.set(i, grad[i]);
        result.store(a.grad_y + start + column);
      }
      if (a.bias) accumulate<width>(of_bias, column, n, grad);
    });
  }

  if (held == 0 && !a.shared) return;
  __syncthreads();
  const int threads = blockDim.x * blockDim.y;
  for (int64_t i = threadIdx.y * blockDim.x + threadIdx.x; i < size; i += threads) {
    float sum = 0;
    for (int y = 0; y < blockDim.y; ++y) sum += shared[y * size + i];
    own[i] = sum;
  }
}

// Distribution of rows of n over threads.
struct Plan {
  bool wide;
  int held;
  dim3 block;
};

template <typename T>
Plan plan_of(int64_t n, bool is_aligned) {
  if (!is_aligned || n % kWide<T>) return {false, 0, n <= 128 ? dim3(32, 4) : dim3(kLoopThreads)};
  const int64_t packs = n / kWide<T>;
  const auto threads = [packs](int64_t held) {
    return dim3(static_cast<unsigned>((packs + 32 * held - 1) / (32 * held) * 32));
  };
  if (packs <= 64) return {true, 2, dim3(32, 4)};
  if (packs <= 2 * kThreads) return {true, 2, threads(2)};
  if (packs <= 4 * kThreads) return {true, 4, threads(4)};
  return {true, 0, dim3(kThreads)};
}

// Calls f with the kernel of the plan and its width.
template <typename Kernels, typename F>
void with_kernel(const Plan& plan, F f) {
  using Width = std::integral_constant<int, Kernels::width>;
  if (!plan.wide) return f(Kernels::template kernel<1, 0>(), std::integral_constant<int, 1>{});
  if (plan.held == 2) return f(Kernels::template kernel<Kernels::width, 2>(), Width{});
  if (plan.held == 4) return f(Kernels::template kernel<Kernels::width, 4>(), Width{});
  return f(Kernels::template kernel<Kernels::width, 0>(), Width{});
}

template <typename T>
struct ForwardKernels {
  static constexpr int width = kWide<T>;
  template <int w, int held>
  static auto kernel() {
    return forward_kernel<T, w, held>;
  }
};

template <typename T>
struct BackwardKernels {
  static constexpr int width = kWide<T>;
  template <int w, int held>
  static auto kernel() {
    return backward_kernel<T, w, held>;
  }
};

int64_t row_blocks(int64_t rows, const Plan& plan) { return (rows + plan.block.y - 1) / plan.block.y; }

int sums_of(const NormBackward& t) { return 1 + (t.grad_norm_bias != nullptr) + (t.grad_bias != nullptr); }

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

struct BackwardPlan : Plan {
  int shared;  // bytes for a block's partial sums; 0: they do not fit and stay in global memory
};

template <typename T>
BackwardPlan backward_plan(const NormEpilogue& e, const NormBackward& t) {
  const Plan plan = plan_of<T>(e.n, aligned({t.grad_out, t.grad_h, t.out, t.weight, t.grad_y, t.grad_x}));
  const int64_t bytes = int64_t{sizeof(float)} * sums_of(t) * e.n * plan.block.y;
  // sum_over_x uses some shared memory, too.
  if (bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024)
    return {plan, static_cast<int>(bytes)};
  return {{plan.wide, 0, plan.held > 0 ? dim3(kThreads) : plan.block}, 0};
}

}  // namespace

void norm_forward(const NormEpilogue& e, const NormForward& t, void* stream) {
  if (e.rows == 0 || e.n == 0) return;
  with_type(e.dtype, [&](auto type) {
    using T = decltype(type);
    const Plan plan = plan_of<T>(e.n, aligned({t.y, t.x, t.bias, t.weight, t.norm_bias, t.out, t.h}));
    const auto in = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const Forward<T> a{in(t.y),
                       in(t.x),
                       in(t.bias),
                       in(t.weight),
                       in(t.norm_bias),
                       static_cast<T*>(t.out),
                       static_cast<T*>(t.h),
                       t.mean,
                       t.rstd,
                       e.rows,
                       e.n,
                       static_cast<float>(e.eps),
                       e.norm == Norm::layer,
                       make_dropout(e.p, e.seed, e.offset, e.n)};
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(row_blocks(e.rows, plan), 1 << 20));
    with_kernel<ForwardKernels<T>>(
        plan, [&](auto kernel, auto) { launch("norm_forward", kernel, blocks, plan.block, 0, stream, a); });
  });
}

int64_t norm_backward_blocks(const NormEpilogue& e, const NormBackward& t) {
  if (e.rows == 0 || e.n == 0) return 0;
  int64_t blocks = 0;
  with_type(e.dtype, [&](auto type) {
    using T = decltype(type);
    const BackwardPlan plan = backward_plan<T>(e, t);
    const int shared = plan.shared;
    int resident = 0;
    with_kernel<BackwardKernels<T>>(plan, [&](auto kernel, auto) {
      if (shared)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "norm");
      const int threads = static_cast<int>(plan.block.x * plan.block.y);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared), "norm");
    });
    // One wave: blocks of a second wave would leave most of the device idle.
    const int64_t wave = int64_t{std::max(resident, 1)} * attribute(cudaDevAttrMultiProcessorCount);
    blocks = std::min(row_blocks(e.rows, plan), wave);
  });
  return blocks;
}

void norm_backward(const NormEpilogue& e, const NormBackward& t, void* stream) {
  if (e.rows == 0 || e.n == 0) return;
  with_type(e.dtype, [&](auto type) {
    using T = decltype(type);
    const BackwardPlan plan = backward_plan<T>(e, t);
    const int sums = sums_of(t), shared = plan.shared;
    const auto in = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const Backward<T> a{in(t.grad_out),
                        in(t.grad_h),
                        in(t.out),
                        in(t.weight),
                        t.mean,
                        t.rstd,
                        static_cast<T*>(t.grad_y),
                        static_cast<T*>(t.grad_x),
                        t.partials,
                        e.rows,
                        e.n,
                        sums,
                        e.norm == Norm::layer,
                        t.grad_norm_bias != nullptr,
                        t.grad_bias != nullptr,
                        shared > 0,
                        make_dropout(e.p, e.seed, e.offset, e.n)};
    Sums stage{t.partials, t.blocks, e.n, sums, {t.grad_weight, t.grad_norm_bias, t.grad_bias}};
    if (!t.grad_norm_bias) stage.outs[1] = t.grad_bias;
    with_kernel<BackwardKernels<T>>(plan, [&](auto kernel, auto width) {
      if (shared)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "norm");
      launch("norm_backward", kernel, static_cast<unsigned>(t.blocks), plan.block, shared, stream, a);
      launch_sum_partials<T, decltype(width)::value>("norm_backward", stage, stream);
    });
  });
}

}  // namespace oases::cuda
