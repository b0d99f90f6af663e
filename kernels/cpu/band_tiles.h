// The register tiles of attention over bands: a few targets times a few vectors of keys.
//
// What a row finds in a tile is the same, bit for bit, whatever its neighbours hold: every row is
// summed up by itself and in one order. The two functions that make logits are never inlined, so
// that the backward finds the very bits of the forward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "columns.h"
#include "feature_sums.h"
#include "simd.h"

namespace graphattn {

// Four rows share what they load of values, which come from the second cache in long windows.
#if defined(__AVX512F__)
constexpr int QUERIES = 8, ROWS = 4, FEATURE_VECTORS = 4;  // of 32 vector registers, 16 hold sums
#elif defined(__AVX2__)
constexpr int QUERIES = 4, ROWS = 4, FEATURE_VECTORS = 2;  // of 16, 8 do
#else
constexpr int QUERIES = 4, ROWS = 2, FEATURE_VECTORS = 4;
#endif
static_assert(ROWS <= Vec<double>::L);  // rows that are taken together lie in the lanes of one vector
constexpr int KEY_VECTORS = 2;
constexpr int64_t BLOCK = 64;       // targets or keys whose weights the backward keeps at a time
constexpr int64_t LONG_SUM = 256;   // keys that are summed up before they join a longer sum

template <class T>
constexpr int KEYS = KEY_VECTORS * Vec<T>::L;  // of a tile

template <class T>
GRAPHATTN_INLINE int64_t whole_vectors(int64_t width) {
  return (width + Vec<T>::L - 1) / Vec<T>::L * Vec<T>::L;
}

// Affinities of QUERIES packed queries [width][QUERIES] and V vectors of packed keys [width][KEYS]:
// dot products, or -|q - k|^2 / 2 from the differences.
template <class T, bool RBF, int V>
GRAPHATTN_NOINLINE void affinities(const T* query, const T* key, int64_t width, T* to,
                                   int64_t stride) {
  constexpr int L = Vec<T>::L;
  vec<T> sums[QUERIES][V] = {};
  for (int64_t d = 0; d < width; ++d) {
    vec<T> k[V];
#pragma GCC unroll 4
    for (int x = 0; x < V; ++x) k[x] = load(key + d * KEYS<T> + x * L);
#pragma GCC unroll 8
    for (int r = 0; r < QUERIES; ++r) {
      const vec<T> q = broadcast(query[d * QUERIES + r]);
#pragma GCC unroll 4
      for (int x = 0; x < V; ++x) {
        if constexpr (RBF) {
          const vec<T> difference = q - k[x];
          sums[r][x] += difference * difference;
        } else {
          sums[r][x] += q * k[x];
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QUERIES; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < V; ++x) {
      store(to + r * stride + x * L, RBF ? sums[r][x] * T(-0.5) : sums[r][x]);
    }
  }
}

// The product of every row with its own, packed [width][QUERIES], less what `to` holds. It has the
// bits that `affinities` has for it, so a weight of exactly 1 leaves exactly nothing of the gradient
// of its logit.
template <class T>
GRAPHATTN_INLINE void products_less(const T* a, const T* b, int64_t width, T* to) {
  typedef T Few __attribute__((vector_size(QUERIES * sizeof(T))));
  Few found{}, x, y;
  for (int64_t d = 0; d < width; ++d) {
    std::memcpy(&x, a + d * QUERIES, sizeof x);
    std::memcpy(&y, b + d * QUERIES, sizeof y);
    found += x * y;
  }
  std::memcpy(&x, to, sizeof x);
  found = found - x;
  std::memcpy(to, &found, sizeof found);
}

// tanh(x), to a unit or two in the last place: near 0 it is e / (e + 2) with e = exp(2x) - 1 from
// its series; elsewhere 1 - 2 / (exp(2x) + 1), whose error is that of 1 rounded, so that what a cap
// makes equal is equal.
template <class V>
GRAPHATTN_INLINE V tanh(V x) {
  using T = lane_t<V>;
  constexpr int degree = ExpNumbers<T>::degree;
  const V size = x < V{} ? -x : x;
  const V twice = minimum(size + size, V{} + T(60));
  V series = twice * T(inverse_factorial(degree)) + T(inverse_factorial(degree - 1));
#pragma GCC unroll 16
  for (int k = degree - 2; k >= 2; --k) series = series * twice + T(inverse_factorial(k));
  const V e = (series * twice) * twice + twice;
  const V near = e / (e + T(2)), far = T(1) - T(2) / (exp(twice) + T(1));
  const V found = twice < V{} + T(0.34) ? near : far;
  return x < V{} ? -found : found;
}

// How a head makes logits of affinities.
template <class T>
struct Logits {
  T scale, cap;  // cap 0: none
  const T* table;  // its entry for source i + hop stands at table[hop]; null: none
};

// Which of a tile's pairs are edges: row r sees lanes first + r .. last + r - 1 but hole + r, as
// far as they are below `end`.
struct Seen {
  int64_t first, last, end, hole;
  bool all;
};

// Logits of a tile, -inf where there is no edge. `hop` leads from the first row to the first key;
// `usable` has 0 for every key, or -inf.
template <class T, int V>
GRAPHATTN_NOINLINE void make_logits(const Logits<T>& how, const Seen& seen, int64_t hop,
                                    const T* usable, const T* from, T* to, int64_t stride) {
  constexpr int L = Vec<T>::L;
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  const vec<T> none = broadcast(NONE);
  // Beyond a tile all places are alike, and float knows the near ones exactly.
  const auto place = [](int64_t lane) {
    return broadcast(T(std::clamp<int64_t>(lane, -QUERIES, V * L)));
  };
  vec<T> low = place(seen.first), high = place(seen.last), hole = place(seen.hole);
  const vec<T> end = place(seen.end);
  for (int r = 0; r < QUERIES; ++r) {
    vec<T> lanes = lane_numbers<T>();
    for (int x = 0; x < V; ++x) {
      vec<T> logit = load(from + r * stride + x * L) * how.scale;
      if (how.cap > 0) logit = tanh(logit / how.cap) * how.cap;
      if (how.table) logit = logit + load(how.table + hop - r + x * L);
      logit = logit + load(usable + x * L);
      if (!seen.all) {
        const auto is_edge = (lanes >= low) & (lanes < high) & (lanes < end) & (lanes != hole);
        logit = is_edge ? logit : none;
        lanes = lanes + T(L);
      }
      store(to + r * stride + x * L, logit);
    }
    low = low + T(1), high = high + T(1), hole = hole + T(1);
  }
}

// to[r] += sum over j of weight[r, j] x[j], or with AROUND of weight[r, j] (x[j] - own[r]), for
// ROWS rows of V vectors.
template <class T, bool AROUND, int V>
GRAPHATTN_INLINE void combine_piece(const T* weight, int64_t of_row, int64_t of_source, const T* x,
                                    int64_t stride, int64_t count, const T* own, T* to) {
  constexpr int L = Vec<T>::L;
  vec<T> sums[ROWS][V] = {}, center[ROWS][V];
  if constexpr (AROUND) {
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < V; ++v) center[r][v] = load(own + r * stride + v * L);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    vec<T> row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = load(x + j * stride + v * L);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const vec<T> w = broadcast(weight[r * of_row + j * of_source]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (AROUND) {
          sums[r][v] += w * (row[v] - center[r][v]);
        } else {
          sums[r][v] += w * row[v];
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      T* place = to + r * stride + v * L;
      store(place, load(place) + sums[r][v]);
    }
  }
}

// The same for rows of `stride` features, whole vectors.
template <class T, bool AROUND>
GRAPHATTN_NOINLINE void combine(const T* weight, int64_t of_row, int64_t of_source, const T* x,
                                int64_t stride, int64_t count, const T* own, T* to) {
  constexpr int L = Vec<T>::L;
  int64_t d = 0;
  // Differences need the rows' own features in registers, too.
  for (; !AROUND && d + FEATURE_VECTORS * L <= stride; d += FEATURE_VECTORS * L) {
    combine_piece<T, AROUND, FEATURE_VECTORS>(weight, of_row, of_source, x + d, stride, count,
                                              own + d, to + d);
  }
  for (; d + 2 * L <= stride; d += 2 * L) {
    combine_piece<T, AROUND, 2>(weight, of_row, of_source, x + d, stride, count, own + d, to + d);
  }
  for (; d < stride; d += L) {
    combine_piece<T, AROUND, 1>(weight, of_row, of_source, x + d, stride, count, own + d, to + d);
  }
}

// ---- Packing ----

template <class T>
struct Orders {
  typedef Ordered<T> type __attribute__((vector_size(vector_bytes)));
};
template <class T>
using orders = typename Orders<T>::type;

// A vector of integers, or the bits of a vector of numbers.
template <class T, class From>
GRAPHATTN_INLINE orders<T> load_orders(const From* from) {
  static_assert(sizeof(From) == sizeof(T));
  orders<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Joins the sizes of a row's numbers with the largest so far, as `is_sound` compares them.
template <class T>
GRAPHATTN_INLINE void join_sizes(const T* x, int64_t width, orders<T>& most) {
  constexpr Ordered<T> size = std::numeric_limits<Ordered<T>>::max();
  constexpr int64_t L = Vec<T>::L;
  int64_t d = 0;
  for (; d + L <= width; d += L) most = maximum(most, load_orders<T>(x + d) & size);
  if (d < width) most = maximum(most, bit_cast<orders<T>>(load_first(x + d, width - d)) & size);
}

// Whether all numbers are so small that no product of two of them, scaled, overflows. As integers,
// without their signs, NaN is above infinity and that above all others.
template <class T>
GRAPHATTN_INLINE bool is_sound(orders<T> most, T limit) {
  return largest(most) <= bit_cast<Ordered<T>>(limit);
}

template <class T>
GRAPHATTN_INLINE bool is_sound(const T* x, int64_t width, T limit) {
  orders<T> most{};
  join_sizes(x, width, most);
  return is_sound(most, limit);
}

// One token into a row of `stride` features; zeros behind it, or for null.
template <class T>
GRAPHATTN_INLINE void put_row(const T* x, int64_t width, T* to, int64_t stride) {
  constexpr int64_t L = Vec<T>::L;
  int64_t d = 0;
  for (; x && d + L <= width; d += L) store(to + d, load(x + d));
  for (; x && d < width; ++d) to[d] = x[d];
  for (; d < stride; ++d) to[d] = T(0);
}

}  // namespace graphattn
