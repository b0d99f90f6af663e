// What one row of features is summed up with, and numbers as integers of their order.
//
// Written once for the kernels that go edge by edge: whichever computes a row finds the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "rows.h"
#include "simd.h"

namespace graphattn {

// Sums of products over one row of features. D is their number, or 0 where it is known only now.

template <class T, int D>
GRAPHATTN_INLINE T dot(const T* a, const T* b, int64_t width) {
  const int64_t n = D ? D : width;
  constexpr int64_t L = Vec<T>::L;
  vec<T> sums{};
  int64_t d = 0;
  for (; d + L <= n; d += L) sums += load(a + d) * load(b + d);
  T found = sum(sums);
  for (; d < n; ++d) found += a[d] * b[d];
  return found;
}

template <class T, int D>
GRAPHATTN_INLINE T squared_distance(const T* a, const T* b, int64_t width) {
  const int64_t n = D ? D : width;
  constexpr int64_t L = Vec<T>::L;
  vec<T> sums{};
  int64_t d = 0;
  for (; d + L <= n; d += L) {
    const auto difference = load(a + d) - load(b + d);
    sums += difference * difference;
  }
  T found = sum(sums);
  for (; d < n; ++d) found += (a[d] - b[d]) * (a[d] - b[d]);
  return found;
}

// into += factor * x
template <class T, int D>
GRAPHATTN_INLINE void add(T* into, T factor, const T* x, int64_t width) {
  const int64_t n = D ? D : width;
  constexpr int64_t L = Vec<T>::L;
  const vec<T> all = broadcast(factor);
  int64_t d = 0;
  for (; d + L <= n; d += L) store(into + d, load(into + d) + all * load(x + d));
  for (; d < n; ++d) into[d] += factor * x[d];
}

template <class T>
GRAPHATTN_INLINE T* at(const TokenView& view, int64_t b, int64_t token, int64_t head) {
  return static_cast<T*>(view.data) + b * view.batch + token * view.token + head * view.head;
}

// Numbers as integers of the same order. Zeros are equal, and NaN counts as infinite.

template <class T>
struct OrderedAs;
template <>
struct OrderedAs<float> {
  using type = int32_t;
};
template <>
struct OrderedAs<double> {
  using type = int64_t;
};
template <class T>
using Ordered = typename OrderedAs<T>::type;

template <class T>
GRAPHATTN_INLINE Ordered<T> ordered(T x) {
  x = std::isnan(x) ? std::numeric_limits<T>::infinity() : x + T(0);  // -0 + 0 is 0
  Ordered<T> bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits ^ ((bits >> (8 * sizeof bits - 1)) & std::numeric_limits<Ordered<T>>::max());
}

}  // namespace graphattn
