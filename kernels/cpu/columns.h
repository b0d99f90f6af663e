// Rows of features as columns: what register tiles multiply lies side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "simd.h"

namespace graphattn {

// a0 b0 a1 b1 ..., the first or the second half of it.
template <bool second, class V, size_t... I>
GRAPHATTN_INLINE V interleave(V a, V b, std::index_sequence<I...>) {
  constexpr size_t lanes = sizeof...(I), from = second ? lanes / 2 : 0;
#if GRAPHATTN_HAS_SHUFFLE
  return __builtin_shufflevector(a, b, (from + I / 2 + I % 2 * lanes)...);
#else
  V found;
  for (size_t i = 0; i < lanes; ++i) found[i] = (i % 2 ? b : a)[from + i / 2];
  return found;
#endif
}

// R rows of L numbers become L rows of R numbers, R vectors as before: interleaved log2(R) times.
template <class T, int R>
GRAPHATTN_INLINE void transpose(vec<T> (&x)[R]) {
  constexpr auto lanes = std::make_index_sequence<Vec<T>::L>();
#pragma GCC unroll 5
  for (int step = 1; step < R; step *= 2) {
    vec<T> y[R];
#pragma GCC unroll 16
    for (int i = 0; i < R / 2; ++i) {
      y[2 * i] = interleave<false>(x[i], x[i + R / 2], lanes);
      y[2 * i + 1] = interleave<true>(x[i], x[i + R / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) x[i] = y[i];
  }
}

// R tokens (null: zeros) into columns of [width][step]; R is L, or what `step` is.
template <class T, int R>
GRAPHATTN_NOINLINE void put_columns(const T* const* tokens, int64_t width, T* to, int64_t step) {
  constexpr int64_t L = Vec<T>::L;
  for (int64_t d = 0; d < width; d += L) {
    const int64_t features = std::min(L, width - d);
    vec<T> x[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      x[r] = vec<T>{};
      if (tokens[r]) x[r] = features == L ? load(tokens[r] + d) : load_first(tokens[r] + d, features);
    }
    transpose<T, R>(x);
    if constexpr (R == L) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        if (r < features) store(to + (d + r) * step, x[r]);
      }
    } else {
      const int64_t count = features * R;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        T* place = to + d * R + r * L;
        if ((r + 1) * L <= count) {
          store(place, x[r]);
        } else if (r * L < count) {
          store_first(place, x[r], count - r * L);
        }
      }
    }
  }
}

}  // namespace graphattn
