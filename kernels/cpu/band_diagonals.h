// Attention over narrow windows: what a few targets find lies offset by offset, [window, L], with
// the targets in the lanes.
//
// A tile of targets and keys would mostly hold pairs that are no edges. Here every pair is one: its
// products are added up over features, as rows lie in memory, and the sums of L targets become one
// vector. Maxima, sums and exponentials of rows need no step across lanes then. As in tiles, what a
// row finds has the same bits whatever its neighbours hold, forward and backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "band_tiles.h"
#include "simd.h"
#include "transpose.h"

namespace graphattn {

constexpr int64_t NARROW = 40, NARROW_TOP_K = 33;  // keys of a window, at most; beyond, tiles are faster
constexpr int64_t OFFSETS = 16;  // whose products are kept before they are added up
constexpr int64_t SPARE = ROWS - 1;  // offsets of zeros on both sides: `combine` takes rows together

// Lane i of the result is the sum of the lanes of x[i], each added up in the same order.
template <int step, class V>
GRAPHATTN_INLINE V sums_of_lanes(V* x) {
  constexpr int L = static_cast<int>(sizeof(V) / sizeof(lane_t<V>));
  if constexpr (step == L) {
    return x[0];
  } else {
    V y[L / step / 2];
#pragma GCC unroll 8
    for (int i = 0; i < L / step / 2; ++i) y[i] = folded<step>(x[2 * i], x[2 * i + 1]);
    return sums_of_lanes<2 * step>(y);
  }
}

// Rows of four tensors that will be read soon, one of each per target. Fetched line by line between
// products they cost little; a processor fetches a dozen lines at a time, and would wait for more.
struct Upcoming {
  static constexpr int64_t TENSORS = 4, LINE = 64;
  const char* row[TENSORS];
  int64_t step[TENSORS];  // bytes from one row to the next
  int64_t lines;          // of a row

  void set(int64_t n, const void* start, int64_t bytes) {
    row[n] = static_cast<const char*>(start), step[n] = bytes;
  }
};

// Products of V vectors of features, of all pairs of a block: parts [offsets, L, vector].
template <class T, bool RBF, int V>
GRAPHATTN_INLINE void diagonal_parts(const T* query, const T* key, int64_t stride, int64_t offsets,
                                     bool more, T* parts, const Upcoming* upcoming) {
  constexpr int L = Vec<T>::L;
  const int64_t lines = upcoming ? Upcoming::TENSORS * upcoming->lines : 0;
  const int64_t at_once = (lines + offsets - 1) / offsets;
  for (int r = 0; r < L; ++r, query += stride, key += stride) {
    const char* next[Upcoming::TENSORS];
    for (int n = 0; lines && n < Upcoming::TENSORS; ++n) {
      next[n] = upcoming->row[n] + r * upcoming->step[n];
    }
    vec<T> q[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) q[v] = load(query + v * L);
    for (int64_t o = 0; o < offsets; ++o) {
      T* part = parts + (o * L + r) * L;
      vec<T> sums = more ? load(part) : vec<T>{};
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const vec<T> k = load(key + o * stride + v * L);
        if constexpr (RBF) {
          const vec<T> difference = q[v] - k;
          sums += difference * difference;
        } else {
          sums += q[v] * k;
        }
      }
      store(part, sums);
      for (int64_t n = o * at_once; n < std::min(lines, (o + 1) * at_once); ++n) {
        prefetch(next[n % Upcoming::TENSORS] + n / Upcoming::TENSORS * Upcoming::LINE, 1);
      }
    }
  }
}

// Affinities of L queries and of the keys r .. r + window - 1 of query r: dot products, or
// -|q - k|^2 / 2. Rows have `stride` features, whole vectors.
template <class T, bool RBF>
GRAPHATTN_NOINLINE void diagonal_affinities(const T* query, const T* key, int64_t stride,
                                            int64_t window, const Upcoming* upcoming, T* parts,
                                            T* to) {
  constexpr int64_t L = Vec<T>::L;
  if (stride == 0) std::fill_n(to, window * L, T(0));  // no features: sums of nothing
  for (int64_t first = 0; first < window && stride > 0; first += OFFSETS, key += OFFSETS * stride) {
    const int64_t offsets = std::min(OFFSETS, window - first);
    const auto soon = [&](int64_t d) { return first == 0 && d == 0 ? upcoming : nullptr; };
    int64_t d = 0;
    for (; d + 8 * L <= stride; d += 8 * L) {
      diagonal_parts<T, RBF, 8>(query + d, key + d, stride, offsets, d > 0, parts, soon(d));
    }
    for (; d + 4 * L <= stride; d += 4 * L) {
      diagonal_parts<T, RBF, 4>(query + d, key + d, stride, offsets, d > 0, parts, soon(d));
    }
    for (; d < stride; d += L) {
      diagonal_parts<T, RBF, 1>(query + d, key + d, stride, offsets, d > 0, parts, soon(d));
    }
    for (int64_t o = 0; o < offsets; ++o) {
      vec<T> x[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) x[r] = load(parts + (o * L + r) * L);
      const vec<T> sums = sums_of_lanes<1>(x);
      store(to + (first + o) * L, RBF ? sums * T(-0.5) : sums);
    }
  }
}

// Logits of a block, -inf where there is no edge. `usable`: 0 or -inf for every key, from the first
// of target 0 on; `hop` leads from a target to its first key, `hole` is the offset without edges.
template <class T>
GRAPHATTN_NOINLINE void diagonal_logits(const Logits<T>& how, int64_t window, int64_t hop,
                                        int64_t hole, const T* usable, const T* from, T* to) {
  constexpr int64_t L = Vec<T>::L;
  for (int64_t o = 0; o < window; ++o) {
    vec<T> logit = load(from + o * L) * how.scale;
    if (how.cap > 0) logit = tanh(logit / how.cap) * how.cap;
    if (how.table) logit = logit + how.table[hop + o];
    logit = logit + load(usable + o);
    store(to + o * L, o == hole ? broadcast(-std::numeric_limits<T>::infinity()) : logit);
  }
}

// Of every row of a block: the least logit kept, the largest that is not, and where the last one that
// is equal to the least stands.
template <class T>
struct Kept {
  vec<T> threshold, next, last;
};

// -inf in place of all logits but the k largest of their rows, of equal ones the first. A logit is
// kept if fewer than k go before it.
template <class T>
GRAPHATTN_NOINLINE Kept<T> keep_largest_of_diagonals(T* logits, int64_t window, int64_t k) {
  constexpr int64_t L = Vec<T>::L;
  const vec<T> none = broadcast(-std::numeric_limits<T>::infinity()), one = broadcast(T(1));
  const vec<T> most = broadcast(T(k));
  vec<T> before[NARROW];
  Kept<T> kept{-none, none, {}};
  for (int64_t o = 0; o < window; ++o) {
    const vec<T> own = load(logits + o * L);
    vec<T> first{}, second{};
    for (int64_t p = 0; p < o; ++p) first += load(logits + p * L) >= own ? one : vec<T>{};
    for (int64_t p = o + 1; p < window; ++p) second += load(logits + p * L) > own ? one : vec<T>{};
    before[o] = first + second;
    kept.threshold = minimum(kept.threshold, before[o] < most ? own : -none);
    kept.next = maximum(kept.next, before[o] < most ? none : own);
  }
  for (int64_t o = 0; o < window; ++o) {
    const vec<T> own = load(logits + o * L);
    const auto is_kept = before[o] < most;
    kept.last = (is_kept & (own == kept.threshold)) ? broadcast(T(o)) : kept.last;
    store(logits + o * L, is_kept ? own : none);
  }
  return kept;
}

// How the numbers of rows r .. r + ROWS - 1 of a block lie for `combine`, where its sources are the
// keys r .. r + window + ROWS - 2; those that a row does not see are offsets of zeros.
template <class T>
constexpr int64_t OF_ROW = 1 - Vec<T>::L;
template <class T>
constexpr int64_t OF_KEY = Vec<T>::L;

template <class T>
GRAPHATTN_INLINE void clear_spare(T* numbers, int64_t window) {
  std::fill_n(numbers - SPARE * Vec<T>::L, SPARE * Vec<T>::L, T(0));
  std::fill_n(numbers + window * Vec<T>::L, SPARE * Vec<T>::L, T(0));
}

}  // namespace graphattn
