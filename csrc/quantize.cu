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

constexpr int kWords = kEach / 4;  // of codes, for a thread

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

// The largest size of a number in the block, as bits, for each of its threads.
__device__ uint32_t largest_bits(const float (&v)[kEach]) {
  uint32_t most = 0;
#pragma unroll
  for (const float x : v) most = larger(most, bits_of(x) & 0x7FFFFFFFu);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, step));
  return most;
}

// Where a thread's codes of a block are.
__device__ int64_t place_of(const Share& share) { return share.block * kN + share.first(); }

template <bool wide>
__device__ void decode(const uint8_t* packed, const Share& share, float (&v)[kEach]) {
  uint32_t words[kWords] = {};
  float scale = 0.0f;
  if (share.exists()) {
    load_words<wide>(packed + place_of(share), words);
    scale = reinterpret_cast<const float*>(packed + share.blocks * kN)[share.block];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = number_of(static_cast<uint8_t>(words[i / 4] >> i % 4 * 8), scale);
}

template <bool wide>
__device__ void encode(float (&v)[kEach], const Share& share, uint8_t* packed) {
  const uint32_t most = largest_bits(v);
  const bool finite = most < kInfinite;
  float largest = finite ? float_of(most) : 0.0f;
  const float lift = lift_of(largest);
#pragma unroll
  for (float& x : v) x = finite ? x * lift : 0.0f;
  largest *= lift;
  float scale = scale_of(largest, 1.0f / lift);
  const float up = to_codes(largest, scale, lift);
  if (!finite) scale = float_of(kNan);
  uint32_t words[kWords] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    words[i / 4] |= (static_cast<uint32_t>(finite ? code_of(v[i], up) : 0) & 255u) << i % 4 * 8;
  if (!share.exists()) return;
  store_words<wide>(packed + place_of(share), words);
  if (share.lane == 0) reinterpret_cast<float*>(packed + share.blocks * kN)[share.block] = scale;
}

template <bool wide>
__device__ void sum_of_block(const float* x, const Parts& parts, int64_t n, const Share& share,
                             float (&v)[kEach]) {
  load_numbers<wide>(x, n, share, v);
  for (int64_t part = 0; part < parts.count; ++part) {
    if (part == parts.skip) continue;
    float other[kEach];
    decode<wide>(parts.at + part * parts.stride, share, other);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] += other[i];
  }
}

template <bool wide>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const float* x, Parts parts, int64_t n, uint8_t* packed) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    sum_of_block<wide>(x, parts, n, share, v);
    encode<wide>(v, share, packed);
  });
}

template <bool wide>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* x, Parts parts, int64_t n, float* out) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    sum_of_block<wide>(x, parts, n, share, v);
    if (share.exists()) store_numbers<wide>(v, n, share, out);
  });
}

template <bool wide>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const uint8_t* packed, int64_t n, float* out) {
  for_each_block(quantized_blocks(n), [&](const Share& share) {
    float v[kEach];
    decode<wide>(packed, share, v);
    if (share.exists()) store_numbers<wide>(v, n, share, out);
  });
}

unsigned grid_for(int64_t n) { return blocks_for(quantized_blocks(n), kBlocksPerLaunch); }

}  // namespace

void quantize_sum(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride,
                  int64_t n, uint8_t* packed, void* stream) {
  const bool wide = aligned({x, parts, packed}) && stride % 16 == 0;
  launch("quantize_sum", wide ? quantize_kernel<true> : quantize_kernel<false>, grid_for(n), kThreads, 0,
         stream, x, Parts{parts, count, skip, stride}, n, packed);
}

void sum_parts(const float* x, const uint8_t* parts, int64_t count, int64_t skip, int64_t stride, int64_t n,
               float* out, void* stream) {
  const bool wide = aligned({x, parts, out}) && stride % 16 == 0;
  launch("sum_parts", wide ? sum_kernel<true> : sum_kernel<false>, grid_for(n), kThreads, 0, stream, x,
         Parts{parts, count, skip, stride}, n, out);
}

void dequantize(const uint8_t* packed, int64_t n, float* out, void* stream) {
  const bool wide = aligned({packed, out});
  launch("dequantize", wide ? dequantize_kernel<true> : dequantize_kernel<false>, grid_for(n), kThreads, 0,
         stream, packed, n, out);
}

}  // namespace oases::cuda
