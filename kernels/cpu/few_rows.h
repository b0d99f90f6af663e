// Linear maps of a few rows, whose time is that of reading the weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "precision.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {

// Weights of T, or halves of it (`kind` of rows.h), as vectors of T.
template <class T, int64_t kind>
struct Weights {
  static constexpr bool as_computed = kind == AS_COMPUTED;
  using Number = std::conditional_t<as_computed, T, uint16_t>;

  static GRAPHATTN_INLINE vec<T> vector(const Number* from) {
    if constexpr (as_computed) {
      return load(from);
    } else {
      halves x;
      std::memcpy(&x, from, sizeof x);
      return kind == FLOAT16 ? of_float16(x) : of_bfloat16(x);
    }
  }

  // Numbers where they lie, or as T in `room`.
  static const T* read(const Number* from, int64_t count, T* room) {
    if constexpr (as_computed) {
      return from;
    } else {
      widen(from, kind == FLOAT16, count, room);
      return room;
    }
  }
};

// Products of `outs` rows of weights, from the first, and `rows` rows of x: out[r * outputs + o].
// Each is summed up by itself, so its bits depend on its two rows alone.
template <int outs, int rows, class T, int64_t kind>
GRAPHATTN_INLINE void products(const typename Weights<T, kind>::Number* weight, const T* x,
                               int64_t inputs, int64_t outputs, T* out) {
  using W = Weights<T, kind>;
  constexpr int64_t L = Vec<T>::L;
  vec<T> sums[outs][rows] = {};
  int64_t i = 0;
  for (; i + L <= inputs; i += L) {
    vec<T> given[rows];
    for (int r = 0; r < rows; ++r) given[r] = load(x + r * inputs + i);
    for (int o = 0; o < outs; ++o) {
      const vec<T> w = W::vector(weight + o * inputs + i);
      for (int r = 0; r < rows; ++r) sums[o][r] += w * given[r];
    }
  }
  for (int o = 0; o < outs; ++o) {
    for (int r = 0; r < rows; ++r) {
      T found = sum(sums[o][r]), room[L];
      const T* w = W::read(weight + o * inputs + i, inputs - i, room);
      for (int64_t rest = i; rest < inputs; ++rest) found += w[rest - i] * x[r * inputs + rest];
      out[r * outputs + o] = found;
    }
  }
}

// The same for all rows, in groups that share what they load of a row of weights.
template <int outs, class T, int64_t kind>
void products_of_rows(const typename Weights<T, kind>::Number* weight, const T* x, int64_t rows,
                      int64_t inputs, int64_t outputs, T* out) {
  int64_t r = 0;
  const auto next = [&](auto some) __attribute__((always_inline)) {
    constexpr int count = decltype(some)::value;
    products<outs, count, T, kind>(weight, x + r * inputs, inputs, outputs, out + r * outputs);
    r += count;
  };
  while (r + 4 <= rows) next(std::integral_constant<int, 4>());
  if (r + 2 <= rows) next(std::integral_constant<int, 2>());
  if (r < rows) next(std::integral_constant<int, 1>());
}

// out [rows, outputs] = x [rows, inputs] W^T + b for outputs first .. last - 1.
template <class T, int64_t kind>
void linear_map(const void* weights, const void* biases, const T* x, int64_t rows, int64_t inputs,
                int64_t outputs, int64_t first, int64_t last, T* out) {
  using Number = typename Weights<T, kind>::Number;
  const Number* weight = static_cast<const Number*>(weights);
  int64_t o = first;
  for (; o + 4 <= last; o += 4) {
    products_of_rows<4, T, kind>(weight + o * inputs, x, rows, inputs, outputs, out + o);
  }
  for (; o < last; ++o) {
    products_of_rows<1, T, kind>(weight + o * inputs, x, rows, inputs, outputs, out + o);
  }
  if (!biases) return;
  Buffer<T> room(Weights<T, kind>::as_computed ? 0 : last - first);
  const T* bias = Weights<T, kind>::read(static_cast<const Number*>(biases) + first, last - first,
                                         room.data());
  for (int64_t r = 0; r < rows; ++r) {
    for (o = first; o < last; ++o) out[r * outputs + o] += bias[o - first];
  }
}

}  // namespace graphattn
