#include "bitmap_kernels.h"

#include "launch.h"

namespace oases::cuda {
namespace {

constexpr int kUnroll = 4;  // loads in flight before the first is used

__device__ uint32_t any_bit(uint4 unit) { return unit.x | unit.y | unit.z | unit.w; }
__device__ uint32_t any_bit(uint32_t unit) { return unit; }
__device__ uint32_t any_bit(uint16_t unit) { return unit; }

// `lanes` threads per row, a power of two up to a warp; mask clears the signs. A block handles kThreads /
// lanes rows at a time, a multiple of 8.
template <typename Unit>
__global__ void pack(const Unit* x, int64_t rows, int64_t units, uint32_t mask, int lanes, uint8_t* bits) {
  __shared__ uint8_t used[kThreads];
  const int per_block = kThreads / lanes, within = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * per_block;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * per_block; first < rows; first += stride) {
    const int64_t row = first + within;
    uint32_t any = 0;
    for (int64_t u = lane; row < rows && u < units && any == 0; u += kUnroll * lanes) {
#pragma unroll
      for (int step = 0; step < kUnroll; ++step) {
        if (u + step * lanes < units) any |= any_bit(x[row * units + u + step * lanes]);
      }
      any &= mask;
    }
    const unsigned votes = __ballot_sync(kAllLanes, any != 0);
    const unsigned of_row =
        lanes == kWarp ? kAllLanes : ((1u << lanes) - 1) << (threadIdx.x % kWarp / lanes * lanes);
    if (lane == 0) used[within] = (votes & of_row) != 0;
    __syncthreads();
    const int64_t byte = first / 8 + threadIdx.x;
    if (threadIdx.x < per_block / 8 && byte < bitmap_bytes(rows)) {
      unsigned packed = 0;
      for (int bit = 0; bit < 8; ++bit) packed |= static_cast<unsigned>(used[threadIdx.x * 8 + bit]) << bit;
      bits[byte] = static_cast<uint8_t>(packed);
    }
    __syncthreads();
  }
}

// The 32 bits of this thread in the tile of this block; those past the last row are cleared.
__device__ uint32_t word_of(const uint8_t* bits, int64_t rows) {
  const int64_t first = blockIdx.x * kBytesPerTile + threadIdx.x * 4;
  uint32_t word = 0;
  for (int byte = 0; byte < 4; ++byte) {
    if (first + byte < bitmap_bytes(rows)) word |= static_cast<uint32_t>(bits[first + byte]) << (8 * byte);
  }
  const int64_t left = rows - first * 8;
  return left <= 0 ? 0 : left < 32 ? word & ((1u << left) - 1) : word;
}

// Number of set bits in the words of the threads up to this one. All threads of a block must call it.
__device__ int64_t sum_up_to_thread(int64_t mine) {
  __shared__ int64_t of_warps[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t sum = sum_up_to_lane(mine, lane);
  if (lane == kWarp - 1) of_warps[warp] = sum;
  __syncthreads();
  for (int before = 0; before < warp; ++before) sum += of_warps[before];
  return sum;
}

__global__ void count(const uint8_t* bits, int64_t rows, int64_t* counts) {
  const int64_t sum = sum_up_to_thread(__popc(word_of(bits, rows)));
  if (threadIdx.x == kThreads - 1) counts[blockIdx.x] = sum;
}

__global__ void list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                     int64_t* indices) {
  uint32_t word = word_of(bits, rows);
  const int64_t set = __popc(word), first = (blockIdx.x * kBytesPerTile + threadIdx.x * 4) * 8;
  int64_t* next = indices + ends[blockIdx.x] - counts[blockIdx.x] + sum_up_to_thread(set) - set;
  for (; word != 0; word &= word - 1) *next++ = first + __ffs(word) - 1;
}

template <typename Unit>
void pack_units(const void* x, int64_t rows, int64_t units, uint32_t mask, uint8_t* bits, void* stream) {
  int lanes = 1;
  while (lanes < kWarp && lanes < units) lanes *= 2;
  launch("bitmap_pack", pack<Unit>, blocks_for(rows, kThreads / lanes), kThreads, 0, stream,
         static_cast<const Unit*>(x), rows, units, mask, lanes, bits);
}

}  // namespace

void bitmap_pack(const void* x, DType dtype, int64_t rows, int64_t n, uint8_t* bits, void* stream) {
  static_assert(kBytesPerTile == 4 * kThreads);
  const int64_t bytes = n * (dtype == DType::f32 ? 4 : 2);
  const uint32_t mask = dtype == DType::f32 ? 0x7fffffffu : 0x7fff7fffu;
  if (bytes % 16 == 0 && aligned({x})) {
    pack_units<uint4>(x, rows, bytes / 16, mask, bits, stream);
  } else if (dtype == DType::f32) {
    pack_units<uint32_t>(x, rows, n, mask, bits, stream);
  } else {
    pack_units<uint16_t>(x, rows, n, mask, bits, stream);
  }
}

void bitmap_count(const uint8_t* bits, int64_t rows, int64_t* counts, void* stream) {
  launch("bitmap_count", count, static_cast<unsigned>(bitmap_tiles(rows)), kThreads, 0, stream, bits, rows,
         counts);
}

void bitmap_list(const uint8_t* bits, int64_t rows, const int64_t* counts, const int64_t* ends,
                 int64_t* indices, void* stream) {
  launch("bitmap_list", list, static_cast<unsigned>(bitmap_tiles(rows)), kThreads, 0, stream, bits, rows,
         counts, ends, indices);
}

}  // namespace oases::cuda
