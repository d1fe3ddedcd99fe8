#include "reduce_ranks.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace oases {
namespace {

#define OASES_ALWAYS_INLINE inline __attribute__((always_inline))

// Numbers that are reduced at a time, in the first-level cache. Loops of a length known to the compiler, over a local
// array, become vector instructions without checks at run time.
constexpr int64_t kReduced = 512;

template <typename T>
constexpr bool kHalfWidth = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;
template <typename T>
using Accumulator = std::conditional_t<kHalfWidth<T>, float, T>;

struct AnyProcessor {
  template <typename T>
  OASES_ALWAYS_INLINE static void load(const T* from, Accumulator<T>* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Accumulator<T>>(from[i]);
  }
  template <typename T>
  OASES_ALWAYS_INLINE static void store(const Accumulator<T>* from, T* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
  }
};

#ifdef __x86_64__
// Conversions of fp16 have instructions of their own; all else is left to the compiler.
struct Avx2 {
  template <typename T>
  OASES_ALWAYS_INLINE static void load(const T* from, Accumulator<T>* to, int64_t n) {
    AnyProcessor::load(from, to, n);
  }
  template <typename T>
  OASES_ALWAYS_INLINE static void store(const Accumulator<T>* from, T* to, int64_t n) {
    AnyProcessor::store(from, to, n);
  }
  __attribute__((target("avx2,f16c"))) static void load(const c10::Half* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    AnyProcessor::load(from + i, to + i, n - i);
  }
  __attribute__((target("avx2,f16c"))) static void store(const float* from, c10::Half* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    AnyProcessor::store(from + i, to + i, n - i);
  }
};
#endif

template <ReduceType reduce, typename T>
OASES_ALWAYS_INLINE T reduced(T a, T b) {
  if constexpr (reduce == ReduceType::PRODUCT) {
    if constexpr (std::is_same_v<T, bool>)
      return a && b;
    else
      return a * b;
  } else if constexpr (reduce == ReduceType::MIN) {
    return b < a ? b : a;
  } else if constexpr (reduce == ReduceType::MAX) {
    return a < b ? b : a;
  } else if constexpr (reduce == ReduceType::BAND) {
    return a & b;
  } else if constexpr (reduce == ReduceType::BOR) {
    return a | b;
  } else if constexpr (reduce == ReduceType::BXOR) {
    return a ^ b;
  } else {
    return a + b;
  }
}

template <typename Processor, ReduceType reduce, typename T>
OASES_ALWAYS_INLINE void reduce_block(const T* const* sources, int ranks, int64_t first, int64_t n,
                                      T* result) {
  Accumulator<T> sum[kReduced], next[kReduced];
  Processor::load(sources[0] + first, sum, n);
  for (int source = 1; source < ranks; ++source) {
    if constexpr (kHalfWidth<T>) {
      Processor::load(sources[source] + first, next, n);
      for (int64_t i = 0; i < n; ++i) sum[i] = reduced<reduce>(sum[i], next[i]);
    } else {
      const T* const from = sources[source] + first;
      for (int64_t i = 0; i < n; ++i) sum[i] = reduced<reduce>(sum[i], from[i]);
    }
  }
  if constexpr (reduce == ReduceType::AVG)
    for (int64_t i = 0; i < n; ++i) sum[i] /= static_cast<Accumulator<T>>(ranks);
  Processor::store(sum, result, n);
}

template <typename Processor, ReduceType reduce, typename T>
OASES_ALWAYS_INLINE void reduce_all(const T* const* sources, int ranks, int64_t count, T* out, T* second) {
  T result[kReduced];
  for (int64_t first = 0; first < count; first += kReduced) {
    const int64_t n = std::min(kReduced, count - first);
    if (n == kReduced)
      reduce_block<Processor, reduce>(sources, ranks, first, kReduced, result);
    else
      reduce_block<Processor, reduce>(sources, ranks, first, n, result);
    std::memcpy(out + first, result, n * sizeof(T));
    if (second) std::memcpy(second + first, result, n * sizeof(T));
  }
}

template <ReduceType reduce, typename T>
void reduce_on_any(const T* const* sources, int ranks, int64_t count, T* out, T* second) {
  reduce_all<AnyProcessor, reduce>(sources, ranks, count, out, second);
}

#ifdef __x86_64__
template <ReduceType reduce, typename T>
__attribute__((target("avx2,f16c"))) void reduce_on_avx2(const T* const* sources, int ranks, int64_t count,
                                                         T* out, T* second) {
  reduce_all<Avx2, reduce>(sources, ranks, count, out, second);
}
#endif

template <ReduceType reduce, typename T>
void reduce_typed(const std::byte* const* sources, int ranks, int64_t count, std::byte* out,
                  std::byte* second) {
  const T* const* typed = reinterpret_cast<const T* const*>(sources);
  T *to = reinterpret_cast<T*>(out), *copy = reinterpret_cast<T*>(second);
#ifdef __x86_64__
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (avx2) return reduce_on_avx2<reduce>(typed, ranks, count, to, copy);
#endif
  reduce_on_any<reduce>(typed, ranks, count, to, copy);
}

using Reducer = void (*)(const std::byte* const*, int, int64_t, std::byte*, std::byte*);

// Null where numbers of type T cannot be reduced so.
template <typename T>
Reducer reducer_of(ReduceType reduce) {
  constexpr bool whole = std::is_integral_v<T>;
  switch (reduce) {
    case ReduceType::SUM:
      return reduce_typed<ReduceType::SUM, T>;
    case ReduceType::PRODUCT:
      return reduce_typed<ReduceType::PRODUCT, T>;
    case ReduceType::MIN:
      return reduce_typed<ReduceType::MIN, T>;
    case ReduceType::MAX:
      return reduce_typed<ReduceType::MAX, T>;
    case ReduceType::AVG:
      if constexpr (!whole) return reduce_typed<ReduceType::AVG, T>;
      return nullptr;
    case ReduceType::BAND:
      if constexpr (whole) return reduce_typed<ReduceType::BAND, T>;
      return nullptr;
    case ReduceType::BOR:
      if constexpr (whole) return reduce_typed<ReduceType::BOR, T>;
      return nullptr;
    case ReduceType::BXOR:
      if constexpr (whole) return reduce_typed<ReduceType::BXOR, T>;
      return nullptr;
    default:
      return nullptr;
  }
}

Reducer reducer_for(at::ScalarType type, ReduceType reduce) {
  switch (type) {
    case at::kFloat:
      return reducer_of<float>(reduce);
    case at::kDouble:
      return reducer_of<double>(reduce);
    case at::kHalf:
      return reducer_of<c10::Half>(reduce);
    case at::kBFloat16:
      return reducer_of<c10::BFloat16>(reduce);
    case at::kChar:
      return reducer_of<int8_t>(reduce);
    case at::kByte:
      return reducer_of<uint8_t>(reduce);
    case at::kBool:
      return reducer_of<bool>(reduce);
    case at::kShort:
      return reducer_of<int16_t>(reduce);
    case at::kInt:
      return reducer_of<int32_t>(reduce);
    case at::kLong:
      return reducer_of<int64_t>(reduce);
    default:
      return nullptr;
  }
}

}  // namespace

const char* reduction_name(ReduceType reduce) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return reduce < ReduceType::UNUSED ? kNames[reduce] : "an unknown operation";
}

void check_reduction(const char* collective, at::ScalarType type, ReduceType reduce) {
  TORCH_CHECK_VALUE(reducer_for(type, reduce), collective, " by ", reduction_name(reduce),
                    " is not available for ", type,
                    " over shared memory; convert the tensor, or use another operation");
}

void reduce_ranks(at::ScalarType type, ReduceType reduce, const std::byte* const* sources, int ranks,
                  int64_t count, std::byte* out, std::byte* second) {
  reducer_for(type, reduce)(sources, ranks, count, out, second);
}

}  // namespace oases
