// A block of 128 numbers for 8 threads, with 16 numbers each: 4 blocks for a warp. Threads move 16 bytes at a time
// where what they access is aligned for it, as all but the packed parts of odd sizes are.
#include "quantize_kernels.h"

#include "launch.h"
#include "quantize_math.h"

namespace oases::cuda {
namespace {

using namespace codes;

constexpr int kLanes = 8, kEach = kN / kLanes, kBlocksPerWarp = kWarp / kLanes;
constexpr int kBlocksPerLaunch = kThreads / kLanes;  // of numbers, for a block of threads

template <Code code>
constexpr int kWords = static_cast<int>(bytes_of_codes(code == Code::int4 ? Code::int8 : code)) / kLanes / 4;

// Parts of a sum, packed: see cpu::quantize_sum.
struct Parts {
  const uint8_t* at;
  int64_t count, skip, stride;
};

// This thread's share of a block.
struct Share {
  int64_t block, blocks;
  int lane;
  __device__ bool exists() const { return block < blocks; }
  __device__ int first() const { return lane * kEach; }  // of its numbers in the block
};

// Calls work(share) for all blocks, by whole warps: shuffles need all threads of one, also of shares that do not exist.
template <typename Work>
__device__ void for_each_block(int64_t blocks, Work work) {
  const int lane = threadIdx.x % kLanes;
  for (int64_t first = first_item() / kWarp * kBlocksPerWarp; first < blocks;
       first += item_stride() / kWarp * kBlocksPerWarp)
    work(Share{first + threadIdx.x % kWarp / kLanes, blocks, lane});
}

template <bool wide, int count>
__device__ void load_words(const uint8_t* from, uint32_t (&words)[count]) {
  if constexpr (wide) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i * 4);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) words[i] = *reinterpret_cast<const uint32_t*>(from + i * 4);
  }
}

template <bool wide, int count>
__device__ void store_words(uint8_t* to, const uint32_t (&words)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    if constexpr (wide) {
      __stwb(reinterpret_cast<uint4*>(to + i * 4), uint4{words[i], words[i + 1], words[i + 2], words[i + 3]});
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j) *reinterpret_cast<uint32_t*>(to + j * 4) = words[j];
    }
  }
}

// Numbers of a share of x [n], zeros behind them.
template <bool wide>
__device__ void load_numbers(const float* x, int64_t n, const Share& share, float (&v)[kEach]) {
  const int64_t at = share.block * kN + share.first();
  if (wide && at + kEach <= n) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const auto four = Pack<float, 4>::load(x + at + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i + j] = four[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = at + i < n ? x[at + i] : 0.0f;
}

template <bool wide>
__device__ void store_numbers(const float (&v)[kEach], int64_t n, const Share& share, float* out) {
  const int64_t at = share.block * kN + share.first();
  if (wide && at + kEach <= n) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      Pack<float, 4> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.set(j, v[i + j]);
      four.store(out + at + i);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (at + i < n) out[at + i] = v[i];
}

// In the order of the CPU: first over numbers 16 apart, of other threads, then over this thread's.
__device__ void hadamard(float (&v)[kEach], int lane) {
#pragma unroll
  for (int half = 1; half < kLanes; half *= 2)
#pragma unroll
    for (float& x : v) {
      const float other = __shfl_xor_sync(kAllLanes, x, half);
      x = lane & half ? other - x : x + other;
    }
#pragma unroll
  for (int half = 1; half < kEach; half *= 2)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (!(i & half)) {
        const float low = v[i], high = v[i + half];
        v[i] = low + high;
        v[i + half] = low - high;
      }
}

// The largest size of a number in the block, as bits, for each of its threads.
__device__ uint32_t largest_bits(const float (&v)[kEach]) {
  uint32_t most = 0;
#pragma unroll
  for (const float x : v) most = larger(most, bits_of(x) & 0x7FFFFFFFu);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, step));
  return most;
}

// Where a thread's codes of a block are: of int4, a thread and the fourth after it have the halves of the same bytes.
template <Code code>
__device__ int64_t place_of(const Share& share) {
  const int lane = code == Code::int4 ? share.lane % (kLanes / 2) : share.lane;
  return share.block * bytes_of_codes(code) + lane * kWords<code> * 4;
}

template <Code code, bool rotated, bool wide>
__device__ void decode(const uint8_t* packed, const Share& share, float (&v)[kEach]) {
  uint32_t words[kWords<code>] = {};
  float scale = 0.0f;
  if (share.exists()) {
    load_words<wide>(packed + place_of<code>(share), words);
    scale = reinterpret_cast<const float*>(packed + share.blocks * bytes_of_codes(code))[share.block];
  }
  const float factor = rotated ? 1.0f : scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if constexpr (code == Code::bf16) {
      v[i] = from_bf16(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
    } else {
      const auto byte = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
      if constexpr (code == Code::int8) v[i] = times(static_cast<float>(static_cast<int8_t>(byte)), factor);
      if constexpr (code == Code::fp8) v[i] = times(from_fp8(byte), factor);
      if constexpr (code == Code::int4) {
        const auto half = static_cast<uint8_t>(share.lane < kLanes / 2 ? byte << 4 : byte);
        v[i] = times(static_cast<float>(static_cast<int8_t>(half) >> 4), factor);
      }
    }
  }
  if constexpr (rotated) {
    hadamard(v, share.lane);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = rotated_back(v[i], share.first() + i, scale);
  }
}

template <Code code, bool rotated, bool wide>
__device__ void encode(float (&v)[kEach], bool stochastic, uint32_t index, uint32_t seed, const Share& share,
                       uint8_t* packed) {
  uint32_t words[kWords<code>] = {};
  float scale = 1.0f;
  if constexpr (code == Code::bf16) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      words[i / 2] |= static_cast<uint32_t>(to_bf16(v[i], stochastic, index + i, seed)) << i % 2 * 16;
  } else {
    const uint32_t most = largest_bits(v);
    const bool finite = most < kInfinite;
    float largest = finite ? float_of(most) : 0.0f;
    const float lift = lift_of(largest, rotated);
#pragma unroll
    for (float& x : v) x = finite ? x * lift : 0.0f;
    largest *= lift;
    if constexpr (rotated) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) v[i] *= sign_of(share.first() + i);
      hadamard(v, share.lane);
      largest = float_of(largest_bits(v));
    }
    constexpr float before = rotated ? kBefore : 1.0f;
    constexpr float limit = largest_code(code);
    scale = scale_of(largest, 1.0f / (lift * before), limit);
    const float up = to_codes(largest, scale, lift, before);
    if (!finite) scale = float_of(kNan);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float offset = stochastic ? noise(index + i, seed) : 0.0f;
      uint32_t byte;
      if constexpr (code == Code::fp8)
        byte = finite ? to_fp8(within(v[i] * up, limit), offset) : 0;
      else
        byte = static_cast<uint32_t>(finite ? to_whole(v[i], up, offset, static_cast<int32_t>(limit)) : 0);
      words[i / 4] |= (byte & (code == Code::int4 ? 15u : 255u)) << i % 4 * 8;
    }
    if constexpr (code == Code::int4) {
#pragma unroll
      for (uint32_t& word : words) word |= __shfl_xor_sync(kAllLanes, word, kLanes / 2) << 4;
    }
  }
  if (!share.exists()) return;
  if (code != Code::int4 || share.lane < kLanes / 2) store_words<wide>(packed + place_of<code>(share), words);
  if (share.lane == 0)
    reinterpret_cast<float*>(packed + share.blocks * bytes_of_codes(code))[share.block] = scale;
}

template <Code code, bool rotated, bool wide>
__device__ void sum_of_block(const float* x, const Parts& parts, int64_t n, const Share& share,
                             float (&v)[kEach]) {
  load_numbers<wide>(x, n, share, v);
  for (int64_t part = 0; part < parts.count; ++part) {
    if (part == parts.skip) continue;
    float other[kEach];
    decode<code, rotated, wide>(parts.at + part * parts.stride, share, other);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] += other[i];
  }
  const int64_t here = n - share.block * kN - share.first();
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i >= here) v[i] = 0.0f;  // of rotated parts, errors of rounding
}

template <Code code, bool rotated, bool wide>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const float* x, Parts parts, int64_t n, int64_t first, bool stochastic, uint32_t seed,
                    uint8_t* packed) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    sum_of_block<code, rotated, wide>(x, parts, n, share, v);
    const auto index = static_cast<uint32_t>(first + share.block * kN + share.first());
    encode<code, rotated, wide>(v, stochastic, index, seed, share, packed);
  });
}

template <Code code, bool rotated, bool wide>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* x, Parts parts, int64_t n, float* out) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    sum_of_block<code, rotated, wide>(x, parts, n, share, v);
    if (share.exists()) store_numbers<wide>(v, n, share, out);
  });
}

template <Code code, bool rotated, bool wide>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const uint8_t* packed, int64_t n, float* out) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    decode<code, rotated, wide>(packed, share, v);
    if (share.exists()) store_numbers<wide>(v, n, share, out);
  });
}

template <Code of, bool turned, bool by_16>
struct Kind {
  static constexpr Code code = of;
  static constexpr bool rotated = turned, wide = by_16;
};

template <Code code, typename F>
void with_options(bool rotated, bool wide, F f) {
  if constexpr (code != Code::bf16) {
    if (rotated) return wide ? f(Kind<code, true, true>{}) : f(Kind<code, true, false>{});
  }
  return wide ? f(Kind<code, false, true>{}) : f(Kind<code, false, false>{});
}

// Calls f with a Kind.
template <typename F>
void with_kind(const Quantization& how, bool wide, F f) {
  switch (how.code) {
    case Code::int8:
      return with_options<Code::int8>(how.rotated, wide, f);
    case Code::fp8:
      return with_options<Code::fp8>(how.rotated, wide, f);
    case Code::int4:
      return with_options<Code::int4>(how.rotated, wide, f);
    case Code::bf16:
      return with_options<Code::bf16>(how.rotated, wide, f);
  }
}

unsigned grid_for(int64_t n) { return blocks_for(quantized_blocks(n), kBlocksPerLaunch); }

}  // namespace

void quantize_sum(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
                  int64_t stride, int64_t n, int64_t first, uint8_t* packed, void* stream) {
  with_kind(how, aligned({x, parts, packed}) && stride % 16 == 0, [&](auto kind) {
    using K = decltype(kind);
    launch("quantize_sum", quantize_kernel<K::code, K::rotated, K::wide>, grid_for(n), kThreads, 0, stream, x,
           Parts{parts, count, skip, stride}, n, first, how.stochastic, folded(how.seed), packed);
  });
}

void sum_parts(const Quantization& how, const float* x, const uint8_t* parts, int64_t count, int64_t skip,
               int64_t stride, int64_t n, float* out, void* stream) {
  with_kind(how, aligned({x, parts, out}) && stride % 16 == 0, [&](auto kind) {
    using K = decltype(kind);
    launch("sum_parts", sum_kernel<K::code, K::rotated, K::wide>, grid_for(n), kThreads, 0, stream, x,
           Parts{parts, count, skip, stride}, n, out);
  });
}

void dequantize(const Quantization& how, const uint8_t* packed, int64_t n, float* out, void* stream) {
  with_kind(how, aligned({packed, out}), [&](auto kind) {
    using K = decltype(kind);
    launch("dequantize", dequantize_kernel<K::code, K::rotated, K::wide>, grid_for(n), kThreads, 0, stream,
           packed, n, out);
  });
}

}  // namespace oases::cuda
