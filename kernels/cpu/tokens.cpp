// The loops over the tokens of a row, for the usual numbers of features.
//
// A row of features stays in registers while the tokens go past, and the products of as many edges
// as a vector has lanes are summed up at once. Every sum has the bits that `dot`,
// `squared_distance` and `add` would give, edge by edge.

#include "tokens.h"

#include <cstdint>
#include <type_traits>
#include <utility>

#include "feature_sums.h"
#include "simd.h"

namespace graphattn {
namespace {

// One head of some tokens: rows of features.
template <class T>
struct Tokens {
  const T* start;  // of token 0
  int64_t stride;
  const int32_t* token;
  int64_t count;

  GRAPHATTN_INLINE const T* operator[](int64_t e) const {
    return start + static_cast<int64_t>(token[e]) * stride;
  }
};

// Starts to fetch the token at place e, where there is one.
template <class T, int D>
GRAPHATTN_INLINE void fetch(const Tokens<T>& tokens, int64_t e, int64_t width) {
  if (e < tokens.count) {
    prefetch(tokens[e], (D ? D : width) * static_cast<int64_t>(sizeof(T)));
  }
}

// ---- The sums of as many vectors as one has lanes ----

#if GRAPHATTN_HAS_SHUFFLE

// Where a lane comes from when a and b hold `lanes` partial sums of every edge, and of each the
// first half is taken: a's edges and then b's, or (within) piece by piece of 128 bits, which no
// lane leaves.
template <int L, int lanes>
constexpr int lane_across(int i) {
  return i / (lanes / 2) * lanes + i % (lanes / 2);
}

template <int L, int S, int lanes>
constexpr int lane_within(int i) {
  const int from_b = i % S >= S / 2 ? L : 0, rest = i % (S / 2);
  return from_b + i / S * S + rest / (lanes / 2) * lanes + rest % (lanes / 2);
}

template <class V, int S, int lanes, bool within, int... I>
GRAPHATTN_INLINE V join_halves(const V& a, const V& b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  if constexpr (within) {
    return __builtin_shufflevector(a, b, lane_within<L, S, lanes>(I)...) +
           __builtin_shufflevector(a, b, (lane_within<L, S, lanes>(I) + lanes / 2)...);
  } else {
    return __builtin_shufflevector(a, b, lane_across<L, lanes>(I)...) +
           __builtin_shufflevector(a, b, (lane_across<L, lanes>(I) + lanes / 2)...);
  }
}

// `lanes` partial sums of each of L / lanes edges: from vectors S apart first, whose sums fill one
// place of every 128 bits, then from neighbours, so that lane i ends up with edge i.
template <int lanes, class V>
GRAPHATTN_INLINE V partial_sums(const V* parts) {
  constexpr int L = sizeof(V) / sizeof(lane_t<V>), S = 16 / sizeof(lane_t<V>);
  constexpr auto all = std::make_integer_sequence<int, L>();
  if constexpr (lanes == L) {
    return parts[0];
  } else if constexpr (lanes >= S) {
    return join_halves<V, S, 2 * lanes, false>(
        partial_sums<2 * lanes>(parts), partial_sums<2 * lanes>(parts + L / (2 * lanes) * S), all);
  } else {
    return join_halves<V, S, 2 * lanes, true>(
        partial_sums<2 * lanes>(parts), partial_sums<2 * lanes>(parts + S / (2 * lanes)), all);
  }
}

#endif

// The sum of every one of L vectors, each with the bits of `sum`.
template <class V>
GRAPHATTN_INLINE V sums(const V* parts) {
#if GRAPHATTN_HAS_SHUFFLE
  return partial_sums<1>(parts);
#else
  V found;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(lane_t<V>)); ++i) found[i] = sum(parts[i]);
  return found;
#endif
}

// ---- Over tokens ----

// found[e] = x . token e, or with DISTANCE -|x - token e|^2 / 2; `next` are fetched meanwhile.
template <class T, int D, bool DISTANCE>
GRAPHATTN_INLINE void products(const T* x, const Tokens<T>& tokens, int64_t width, T* found,
                               const Tokens<T>& next) {
  constexpr int64_t L = Vec<T>::L;
  const int64_t n = D ? D : width, count = tokens.count;
  int64_t e = 0;
  for (; count - e >= L; e += L) {
    vec<T> parts[L];
#pragma GCC unroll 16
    for (int64_t k = 0; k < L; ++k) {
      fetch<T, D>(next, e + k, width);
      const T* token = tokens[e + k];
      vec<T> part{};
#pragma GCC unroll 8
      for (int64_t d = 0; d + L <= n; d += L) {
        if (DISTANCE) {
          const auto difference = load(x + d) - load(token + d);
          part += difference * difference;
        } else {
          part += load(x + d) * load(token + d);
        }
      }
      parts[k] = part;
    }
    vec<T> whole = sums(parts);
    if (n % L) {
      for (int64_t k = 0; k < L; ++k) {
        const T* token = tokens[e + k];
        T one = whole[k];
        for (int64_t d = n / L * L; d < n; ++d) {
          one += DISTANCE ? (x[d] - token[d]) * (x[d] - token[d]) : x[d] * token[d];
        }
        whole[k] = one;
      }
    }
    store(found + e, DISTANCE ? whole / T(-2) : whole);
  }
  for (; e < count; ++e) {
    fetch<T, D>(next, e, width);
    found[e] = DISTANCE ? squared_distance<T, D>(x, tokens[e], width) / -2
                        : dot<T, D>(x, tokens[e], width);
  }
  for (; e < next.count; ++e) fetch<T, D>(next, e, width);
}

// C vectors of features; see `add_tokens`.
template <class T, int D, int C, bool DIFFERENCE, bool FETCH>
GRAPHATTN_INLINE void add_chunk(T* into, bool fresh, const T* factor, const T* state, T counts_above,
                                const Tokens<T>& tokens, const T* less, int64_t width, int64_t d,
                                const Tokens<T>& next) {
  constexpr int64_t L = Vec<T>::L;
  vec<T> all[C];
  for (int c = 0; c < C; ++c) all[c] = fresh ? vec<T>{} : load(into + d + c * L);
  for (int64_t e = 0; e < tokens.count; ++e) {
    if (FETCH) fetch<T, D>(next, e, width);
    if (state[e] <= counts_above) continue;
    const vec<T> by = broadcast(factor[e]);
    const T* token = tokens[e] + d;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if (DIFFERENCE) {
        all[c] += by * (load(token + c * L) - load(less + d + c * L));
      } else {
        all[c] += by * load(token + c * L);
      }
    }
  }
  for (int c = 0; c < C; ++c) store(into + d + c * L, all[c]);
}

// into += the sum of factor[e] token[e], or with DIFFERENCE of factor[e] (token[e] - less), over
// the edges whose state is not at most `counts_above`; `fresh`: into is written, not read. `next`
// are fetched meanwhile.
template <class T, int D, bool DIFFERENCE>
GRAPHATTN_INLINE void add_tokens(T* into, bool fresh, const T* factor, const T* state,
                                 T counts_above, const Tokens<T>& tokens, const T* less,
                                 int64_t width, const Tokens<T>& next) {
  constexpr int64_t L = Vec<T>::L;
  constexpr int C = D ? (D / L < 8 ? D / L : 8) : 4;
  const int64_t n = D ? D : width;
  int64_t d = 0;
  if constexpr (C > 0) {
    if (C * L <= n) {
      add_chunk<T, D, C, DIFFERENCE, true>(into, fresh, factor, state, counts_above, tokens, less,
                                           width, 0, next);
      d = C * L;
    }
    for (; d + C * L <= n; d += C * L) {
      add_chunk<T, D, C, DIFFERENCE, false>(into, fresh, factor, state, counts_above, tokens, less,
                                            width, d, next);
    }
  }
  for (; d + L <= n; d += L) {
    add_chunk<T, D, 1, DIFFERENCE, false>(into, fresh, factor, state, counts_above, tokens, less,
                                          width, d, next);
  }
  for (; d < n; ++d) {
    T one = fresh ? T(0) : into[d];
    for (int64_t e = 0; e < tokens.count; ++e) {
      if (state[e] <= counts_above) continue;
      one += factor[e] * (DIFFERENCE ? tokens[e][d] - less[d] : tokens[e][d]);
    }
    into[d] = one;
  }
  const int64_t fetched = C > 0 && C * L <= n ? tokens.count : 0;
  for (int64_t e = fetched; e < next.count; ++e) fetch<T, D>(next, e, width);
}

// ---- All heads ----

// f(h, g, tokens, next) for every query head h and its key head g.
template <class T, class F>
GRAPHATTN_INLINE void for_heads(const TokenLoop<T>& loop, const F& f) {
  for (int64_t g = 0, h = 0; g < loop.key_heads; ++g) {
    for (int64_t r = 0; r < loop.repeats; ++r, ++h) {
      if (loop.silent && loop.silent[h]) continue;
      const T* start = loop.tokens.at(h, g);
      f(h, g, Tokens<T>{start, loop.stride, loop.token, loop.count},
        Tokens<T>{start, loop.stride, loop.next, loop.next_count});
    }
  }
}

template <class T, int D, bool DISTANCE>
void products_of_heads(const TokenLoop<T>& loop, T* found) {
  for_heads(loop, [&](int64_t h, int64_t g, const Tokens<T>& tokens, const Tokens<T>& next)
            __attribute__((always_inline)) {
    products<T, D, DISTANCE>(loop.own.at(h, g), tokens, loop.width, found + h * loop.edges, next);
  });
}

template <class T, int D, bool DIFFERENCE>
void sums_of_heads(const TokenLoop<T>& loop, const T* factor, const T* state, T counts_above,
                   const Heads<T>& into, T* block) {
  for_heads(loop, [&](int64_t h, int64_t g, const Tokens<T>& tokens, const Tokens<T>& next)
            __attribute__((always_inline)) {
    const int64_t place = h * loop.edges;
    const bool fresh = block || into.query_head || h == g * loop.repeats;
    T* sum = into.at(h, g);
    add_tokens<T, D, DIFFERENCE>(block ? block : sum, fresh, factor + place, state + place,
                                 counts_above, tokens, loop.own.at(h, g), loop.width, next);
    if (block) add<T, D>(sum, T(1), block, loop.width);
  });
}

template <class T, int D>
TokenLoops<T> loops_of(bool is_rbf) {
  const auto products = products_of_heads<T, D, false>;
  const auto sums = sums_of_heads<T, D, false>;
  if (!is_rbf) return {products, products, sums, sums};
  return {products, products_of_heads<T, D, true>, sums, sums_of_heads<T, D, true>};
}

}  // namespace

template <class T>
TokenLoops<T> token_loops(int64_t width, int64_t value_width, bool is_rbf) {
  // Widths that are known take a quarter less time; of float64 nobody waits for it.
  if constexpr (std::is_same_v<T, float>) {
    switch (width == value_width ? width : 0) {
      case 16: return loops_of<T, 16>(is_rbf);
      case 32: return loops_of<T, 32>(is_rbf);
      case 64: return loops_of<T, 64>(is_rbf);
      case 128: return loops_of<T, 128>(is_rbf);
    }
  }
  return loops_of<T, 0>(is_rbf);
}

template TokenLoops<float> token_loops(int64_t, int64_t, bool);
template TokenLoops<double> token_loops(int64_t, int64_t, bool);

}  // namespace graphattn
