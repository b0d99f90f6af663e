// Squares of numbers, as many vectors as one has lanes, with rows and columns exchanged.
#pragma once

#include <cstdint>
#include <utility>

#include "simd.h"

namespace graphattn {

#if GRAPHATTN_HAS_SHUFFLE

// Of two rows `step` apart: the lanes that stay, and those that come from `step` lanes further on.
template <int step, bool upper, class V, size_t... I>
GRAPHATTN_INLINE V exchanged(V a, V b, std::index_sequence<I...>) {
  constexpr size_t L = sizeof...(I);
  if constexpr (upper) {
    return __builtin_shufflevector(a, b, (I & step ? I + L : I + step)...);
  } else {
    return __builtin_shufflevector(a, b, (I & step ? I - step + L : I)...);
  }
}

// Sums of the two lanes whose numbers differ in the bit `step` alone: those of a where this bit is 0,
// those of b where it is 1. (One blend and one shuffle.)
template <int step, class V, size_t... I>
GRAPHATTN_INLINE V folded(V a, V b, std::index_sequence<I...>) {
  constexpr size_t L = sizeof...(I);
  return __builtin_shufflevector(a, b, (I & step ? I + L : I)...) +
         __builtin_shufflevector(a, b, (I & step ? I + L - step : I + step)...);
}

template <int step, class V>
GRAPHATTN_INLINE V folded(V a, V b) {
  constexpr size_t L = sizeof(V) / sizeof(lane_t<V>);
  return folded<step>(a, b, std::make_index_sequence<L>());
}

template <int step, class V>
GRAPHATTN_INLINE void transpose_from(V* x) {
  constexpr int L = static_cast<int>(sizeof(V) / sizeof(lane_t<V>));
  if constexpr (step < L) {
    constexpr auto lanes = std::make_index_sequence<static_cast<size_t>(L)>();
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i & step) continue;
      const V a = x[i], b = x[i + step];
      x[i] = exchanged<step, false>(a, b, lanes);
      x[i + step] = exchanged<step, true>(a, b, lanes);
    }
    transpose_from<2 * step>(x);
  }
}

// x[i][j] becomes x[j][i].
template <class V>
GRAPHATTN_INLINE void transpose(V* x) {
  transpose_from<1>(x);
}

#else

template <int step, class V>
GRAPHATTN_INLINE V folded(V a, V b) {
  constexpr int L = static_cast<int>(sizeof(V) / sizeof(lane_t<V>));
  V found;
  for (int i = 0; i < L; ++i) found[i] = i & step ? b[i] + b[i - step] : a[i] + a[i + step];
  return found;
}

template <class V>
GRAPHATTN_INLINE void transpose(V* x) {
  constexpr int L = static_cast<int>(sizeof(V) / sizeof(lane_t<V>));
  for (int i = 0; i < L; ++i) {
    for (int j = 0; j < i; ++j) {
      const lane_t<V> one = x[i][j];
      x[i][j] = x[j][i], x[j][i] = one;
    }
  }
}

#endif

}  // namespace graphattn
