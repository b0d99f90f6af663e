// Which lanes of a vector are small enough, as bits of an integer, and lists of the lanes that are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace graphattn {

// Bit i is set where x[i] <= limit[i]; never where one of them is NaN.
GRAPHATTN_INLINE uint32_t at_most(vec<float> x, vec<float> limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_LE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)(x <= limit)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)(x <= limit)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < Vec<float>::L; ++i) bits |= static_cast<uint32_t>(x[i] <= limit[i]) << i;
  return bits;
#endif
}

GRAPHATTN_INLINE uint32_t at_most(vec<double> x, vec<double> limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_pd_mask((__m512d)x, (__m512d)limit, _CMP_LE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_pd((__m256d)(x <= limit)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_pd((__m128d)(x <= limit)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < Vec<double>::L; ++i) bits |= static_cast<uint32_t>(x[i] <= limit[i]) << i;
  return bits;
#endif
}

// As many places as a vector has lanes. (Computed and kept in a register: places that are written one
// by one and loaded at once wait for each other.)
template <class T>
struct Places {
  typedef int32_t type __attribute__((vector_size(Vec<T>::L * sizeof(int32_t))));
};

// first, first + 1, ...
template <class T, size_t... I>
GRAPHATTN_INLINE typename Places<T>::type places_from(int32_t first, std::index_sequence<I...>) {
  return typename Places<T>::type{static_cast<int32_t>(I)...} + first;
}

// Appends the lanes of x whose bits are set, and their places, to two lists that hold `count`;
// returns how many they hold now. Up to a vector behind them is written, too. What is appended may
// have stood in the list itself, at or behind its end.
template <class T>
GRAPHATTN_INLINE int64_t append_lanes(vec<T> x, uint32_t bits, typename Places<T>::type places_of_x,
                                      T* values, int32_t* places, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const auto mask = static_cast<__mmask16>(bits);
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(mask, (__m512)x));
    _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(mask, (__m512i)places_of_x));
  } else {
    const auto mask = static_cast<__mmask8>(bits);
    _mm512_storeu_pd(values + count, _mm512_maskz_compress_pd(mask, (__m512d)x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(places + count),
                        _mm256_maskz_compress_epi32(mask, (__m256i)places_of_x));
  }
  return count + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    values[count] = x[lane];
    places[count++] = places_of_x[lane];
  }
  return count;
#endif
}

}  // namespace graphattn
