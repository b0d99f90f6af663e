// Squared distances in float64 from coordinate differences, and the nearest by them: what decides.
//
// Every build rounds alike: a distance is the sum of eight sums (of coordinates 0, 8, 16, ..., of 1,
// 9, ... and so on), joined by halves, and of what is left of the last eight, one after the other.
// No product is joined with a sum, so up to three coordinates give the bits of torch and numpy.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define GRAPHATTN_NO_JOINING __attribute__((noinline))
#else
#define GRAPHATTN_NO_JOINING __attribute__((noinline, optimize("fp-contract=off")))
#endif

namespace graphattn {

constexpr int64_t SUMS = 8;  // side by side, whatever the instruction set

typedef double EightSums __attribute__((vector_size(SUMS * sizeof(double))));

GRAPHATTN_INLINE EightSums eight_of(const double* from) {
  EightSums x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

GRAPHATTN_INLINE EightSums eight_of(const float* from) {
#if defined(__AVX512F__)
  // GCC would widen it in two halves.
  return (EightSums)_mm512_maskz_cvtps_pd(__mmask8(-1), _mm256_loadu_ps(from));
#else
  typedef float Eight __attribute__((vector_size(SUMS * sizeof(float))));
  Eight x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, EightSums);
#endif
}

// squared[i]: from point a to row place[i] of b. Several rows at a time: each of their sums waits for
// the addition before it.
template <class T>
GRAPHATTN_NO_JOINING void squared_distances(const T* a, const T* b, int64_t width, int64_t count,
                                            const int32_t* place, double* squared) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  constexpr int64_t ROWS_AT_ONCE = 4;
  const int64_t whole = width / SUMS * SUMS;
  for (int64_t first = 0; first < count; first += ROWS_AT_ONCE) {
    const int64_t rows = count - first < ROWS_AT_ONCE ? count - first : ROWS_AT_ONCE;
    const T* other[ROWS_AT_ONCE];
    for (int64_t r = 0; r < ROWS_AT_ONCE; ++r) {  // behind the last row the last once more
      other[r] = b + static_cast<int64_t>(place[first + (r < rows ? r : rows - 1)]) * width;
    }
    EightSums sums[ROWS_AT_ONCE] = {};
    if (rows > 1) {
      for (int64_t c = 0; c < whole; c += SUMS) {
        const EightSums x = eight_of(a + c);
#pragma GCC unroll 4
        for (int64_t r = 0; r < ROWS_AT_ONCE; ++r) {
          const EightSums gap = x - eight_of(other[r] + c);
          sums[r] = sums[r] + gap * gap;
        }
      }
    } else {
      for (int64_t c = 0; c < whole; c += SUMS) {
        const EightSums gap = eight_of(a + c) - eight_of(other[0] + c);
        sums[0] = sums[0] + gap * gap;
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      double rest = 0;
      for (int64_t c = whole; c < width; ++c) {
        const double gap = static_cast<double>(a[c]) - static_cast<double>(other[r][c]);
        rest += gap * gap;
      }
      if (whole) {
        const EightSums s = sums[r];
        rest = (((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))) + rest;
      }
      squared[first + r] = rest;
    }
  }
}

}  // namespace graphattn
