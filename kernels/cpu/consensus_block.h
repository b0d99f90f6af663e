// R of a block of edges, and what it does to a vector: edges in the lanes of vectors.
//
// With raw rows l_k of Lambda, R d = alpha d + (beta / r) sum_k l_k (l_k . d) / |l_k|^2. The product
// that makes the rows is nearly all of the work, and what follows reads them from the cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "consensus.h"
#include "consensus_walk.h"
#include "edge_products.h"
#include "gelu.h"
#include "precision.h"
#include "simd.h"
#include "transpose.h"

namespace graphattn {

// The second layer for one head.
template <class T>
struct HeadNetwork {
  const T *alpha, *beta, *shear, *shear_bias;
  T alpha_bias, beta_bias;

  HeadNetwork(const ConsensusNetwork& all, int64_t head, int64_t xi, int64_t rows)
      : alpha(static_cast<const T*>(all.alpha) + head * xi),
        beta(static_cast<const T*>(all.beta) + head * xi),
        shear(static_cast<const T*>(all.shear) + head * rows * xi),
        shear_bias(static_cast<const T*>(all.shear_bias) + head * rows),
        alpha_bias(static_cast<const T*>(all.alpha_bias)[head]),
        beta_bias(static_cast<const T*>(all.beta_bias)[head]) {}
};

// The numbers of one head or group at both ends of every edge of a block; unused lanes repeat the
// first.
template <class T>
struct Ends {
  const T *target[EDGES<T>], *source[EDGES<T>];
};

// x[f, e] = join(target[e][f], source[e][f], e, f) for `width` features of some vectors of edges;
// join gets L features of edge e, from feature f on. (It is long, and not unrolled: the compiler
// takes seconds for that.)
template <class T, class Join>
GRAPHATTN_INLINE void by_feature(const Ends<T>& ends, int vectors, int64_t width, T* x,
                                 const Join& join) {
  constexpr int64_t L = Vec<T>::L;
  for (int v = 0; v < vectors; ++v) {
    for (int64_t f = 0; f < width; f += L) {
      vec<T> square[L], other[L];
      const int64_t count = std::min(L, width - f);
      if (count == L) {
        for (int64_t e = 0; e < L; ++e) {
          square[e] = load(ends.target[v * L + e] + f), other[e] = load(ends.source[v * L + e] + f);
        }
      } else {
        for (int64_t e = 0; e < L; ++e) {
          square[e] = load_first(ends.target[v * L + e] + f, count);
          other[e] = load_first(ends.source[v * L + e] + f, count);
        }
      }
      for (int64_t e = 0; e < L; ++e) square[e] = join(square[e], other[e], v * L + e, f);
      transpose(square);
      T* to = x + f * EDGES<T> + v * L;
      if (count == L) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < L; ++i) store(to + i * EDGES<T>, square[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) store(to + i * EDGES<T>, square[i]);
      }
    }
  }
}

// The reverse: give(e, f, numbers, how many) for L features of edge e from feature f on.
template <class T, class Give>
GRAPHATTN_INLINE void by_edge(const T* x, int64_t width, int64_t edges, const Give& give) {
  constexpr int64_t L = Vec<T>::L;
  for (int64_t first = 0; first < edges; first += L) {
    for (int64_t f = 0; f < width; f += L) {
      vec<T> square[L];
      const int64_t count = std::min(L, width - f), last = std::min(L, edges - first);
      for (int64_t i = 0; i < L; ++i) {
        square[i] = i < count ? load(x + (f + i) * EDGES<T> + first) : vec<T>{};
      }
      transpose(square);
      for (int64_t e = 0; e < last; ++e) give(first + e, f, square[e], count);
    }
  }
}

// Where a call keeps what belongs to one head of a block of edges; null where it keeps nothing.
template <class T>
GRAPHATTN_INLINE T* kept_of(const ConsensusCall& call, int64_t block, int64_t head) {
  if (!call.kept) return nullptr;
  const int64_t size = (2 + call.rank * call.width) * EDGES<T>;
  return static_cast<T*>(call.kept) + (block * call.heads + head) * size;
}

constexpr double LARGEST_SQUARE = 1099511627776.0;  // 2^40: it and its reciprocal are in range

template <class T>
struct EdgeBlock {
  int vectors = 2;            // of its edges, 1 or 2
  std::vector<T> hidden;      // [trunks * xi, EDGES]
  std::vector<T> rows;        // [rank * width, EDGES]
  std::vector<T> difference;  // [width, EDGES]
  std::vector<T> pull;        // [width, EDGES]
  T alpha_logit[EDGES<T>], beta_logit[EDGES<T>], alpha[EDGES<T>], beta[EDGES<T>];
  std::vector<T> per_square;  // [rank, EDGES]: 1 / |l_k|^2, 0 of a zero row
  std::vector<T> divisor;     // [rank, EDGES]: what rows were divided by, to come into range
  bool is_usual = true;       // whether all divisors are 1

  void reserve(int64_t trunks, int64_t xi, int64_t rank, int64_t width) {
    const auto resize = [](std::vector<T>& x, int64_t numbers) {
      x.resize(static_cast<size_t>(numbers * EDGES<T>));
    };
    resize(hidden, trunks * xi);
    resize(rows, rank * width);
    for (auto* x : {&difference, &pull}) resize(*x, width);
    for (auto* x : {&per_square, &divisor}) resize(*x, rank);
  }

  // alpha, beta and the raw rows of Lambda, from the hidden vectors.
  void find_rows(const HeadNetwork<T>& network, int64_t xi, int64_t trunks, int64_t count) {
    const int64_t third = trunks == 1 ? 0 : xi * EDGES<T>;
    const T* from = hidden.data();
    const auto row = vectors == 2 ? forward_row<T, 2> : forward_row<T, 1>;
    row(network.alpha, network.alpha_bias, xi, from, alpha_logit);
    row(network.beta, network.beta_bias, xi, from + third, beta_logit);
    const auto product = vectors == 2 ? forward_product<T, 2> : forward_product<T, 1>;
    product(network.shear, network.shear_bias, count, xi, from + 2 * third, rows.data());
    find_strengths();
  }

  // What `find_rows` found, kept for the backward, and as the backward reads it.
  void keep(T* kept, int64_t count) const {
    std::copy_n(alpha_logit, EDGES<T>, kept);
    std::copy_n(beta_logit, EDGES<T>, kept + EDGES<T>);
    std::copy_n(rows.data(), count * EDGES<T>, kept + 2 * EDGES<T>);
  }

  void recall(const T* kept, int64_t count) {
    std::copy_n(kept, EDGES<T>, alpha_logit);
    std::copy_n(kept + EDGES<T>, EDGES<T>, beta_logit);
    std::copy_n(kept + 2 * EDGES<T>, count * EDGES<T>, rows.data());
    find_strengths();
  }

  void find_strengths() {
    for (int v = 0; v < vectors; ++v) {
      store(alpha + v * Vec<T>::L, softplus(load(alpha_logit + v * Vec<T>::L)));
      store(beta + v * Vec<T>::L, softplus(load(beta_logit + v * Vec<T>::L)));
    }
  }

  // 1 / |l_k|^2; rows whose squares would leave the range are divided by their largest entry. That
  // is decided lane by lane: no edge changes the rounding of another.
  void find_squares(int64_t rank, int64_t width) {
    constexpr int64_t L = Vec<T>::L;
    is_usual = true;
    for (int64_t k = 0; k < rank; ++k) {
      for (int v = 0; v < vectors; ++v) {
        T* row = rows.data() + k * width * EDGES<T> + v * L;
        vec<T> square = squared(row, width);
        vec<T> by = broadcast(T(1));
        const auto is_inside = (square >= T(1 / LARGEST_SQUARE)) & (square <= T(LARGEST_SQUARE));
        const vec<T> is_normal = is_inside ? broadcast(T(1)) : vec<T>{};
        if (sum(is_normal) != T(L)) {
          vec<T> largest{};
          for (int64_t d = 0; d < width; ++d) {
            const vec<T> x = load(row + d * EDGES<T>), size = -minus_size(x);
            largest = size <= largest ? largest : size;  // NaN too
          }
          by = is_normal == T(1) || largest == T(0) ? by : largest;
          for (int64_t d = 0; d < width; ++d) {
            store(row + d * EDGES<T>, load(row + d * EDGES<T>) / by);
          }
          square = squared(row, width);
          is_usual = false;
        }
        const vec<T> reciprocal = T(1) / square;
        store(per_square.data() + k * EDGES<T> + v * L, square == T(0) ? vec<T>{} : reciprocal);
        store(divisor.data() + k * EDGES<T> + v * L, by);
      }
    }
  }

  // R x for x [width, EDGES]; `along` [rank, EDGES], if asked for, gets l_k . x.
  void apply(const T* x, int64_t rank, int64_t width, T* to, T* along = nullptr) const {
    constexpr int64_t L = Vec<T>::L;
    for (int v = 0; v < vectors; ++v) {
      const vec<T> of_alpha = load(alpha + v * L);
      const vec<T> of_beta = load(beta + v * L) * T(T(1) / static_cast<T>(rank));
      for (int64_t d = 0; d < width; ++d) {
        const int64_t at = d * EDGES<T> + v * L;
        store(to + at, of_alpha * load(x + at));
      }
      for (int64_t k = 0; k < rank; ++k) {
        const T* row = rows.data() + k * width * EDGES<T> + v * L;
        const vec<T> product = dot(row, x + v * L, width);
        if (along) store(along + k * EDGES<T> + v * L, product);
        const vec<T> share = of_beta * (product * load(per_square.data() + k * EDGES<T> + v * L));
        for (int64_t d = 0; d < width; ++d) {
          T* sum = to + d * EDGES<T> + v * L;
          store(sum, load(sum) + share * load(row + d * EDGES<T>));
        }
      }
    }
  }

  // x . y over features, in four sums at a time.
  static GRAPHATTN_INLINE vec<T> dot(const T* x, const T* y, int64_t width) {
    vec<T> sums[4] = {};
    int64_t d = 0;
    for (; d + 4 <= width; d += 4) {
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
        sums[p] += load(x + (d + p) * EDGES<T>) * load(y + (d + p) * EDGES<T>);
      }
    }
    for (; d < width; ++d) sums[0] += load(x + d * EDGES<T>) * load(y + d * EDGES<T>);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

 private:
  static GRAPHATTN_INLINE vec<T> squared(const T* row, int64_t width) {
    return dot(row, row, width);
  }
};

// Tokens of one head as numbers of type T: where they lie, or converted in `room`.
template <class T>
struct EndReader {
  std::vector<T> room;  // of halves: [2, EDGES, width]

  // Both ends of some edges.
  void read(const TokenView& of_targets, const TokenView& of_sources, int64_t head, int64_t width,
            const Edge* edges, int64_t count, Ends<T>& ends) {
    if (is_half<T>(of_targets) || is_half<T>(of_sources)) {
      room.resize(static_cast<size_t>(2 * EDGES<T> * width));
    }
    T* rest = room.data();
    for (int64_t e = 0; e < count; ++e) {
      const Edge& edge = edges[e];
      const bool again = e > 0 && edge.target == edges[e - 1].target &&
                         edge.sample == edges[e - 1].sample;
      ends.target[e] = again ? ends.target[e - 1]
                             : read_head(of_targets, edge.sample, edge.target, head, width, rest);
      ends.source[e] = read_head(of_sources, edge.sample, edge.source, head, width, rest + width);
      if (room.size()) rest += 2 * width;
    }
    for (int64_t e = count; e < EDGES<T>; ++e) {
      ends.target[e] = ends.target[0], ends.source[e] = ends.source[0];
    }
  }
};

// What edges themselves add to their hidden vectors, for a block of them and one group.
template <class T>
struct EdgeFeatures {
  std::vector<T> rows;  // [EDGES, stride]
  int64_t stride = 0;   // features, and room for a vector more

  void reserve(const ConsensusCall& call) {
    stride = call.trunks * call.hidden + Vec<T>::L;
    if (call.edge) rows.assign(static_cast<size_t>(EDGES<T> * stride), T(0));
  }

  static const T* numbers(const ConsensusCall& call, const Edge& edge) {
    const int64_t count = call.edge_weight ? call.edge_inputs
                                           : call.groups * call.trunks * call.hidden;
    return static_cast<const T*>(call.edge) + edge.sample * call.edge_batch + edge.place * count;
  }

  // One group's part of the first layer: [edge_inputs, features].
  static const T* weight(const ConsensusCall& call, int64_t group) {
    const int64_t size = call.edge_inputs * call.trunks * call.hidden;
    return static_cast<const T*>(call.edge_weight) + group * size;
  }

  void find(const ConsensusCall& call, const Edge* edges, int64_t count, int64_t group) {
    const int64_t features = call.trunks * call.hidden;
    for (int64_t e = 0; e < count; ++e) {
      const T* given = numbers(call, edges[e]);
      T* row = rows.data() + e * stride;
      if (!call.edge_weight) {
        std::copy_n(given + group * features, features, row);
        continue;
      }
      std::fill_n(row, features, T(0));
      const T* layer = weight(call, group);
      for (int64_t q = 0; q < call.edge_inputs; ++q) {
        add<T, 0>(row, given[q], layer + q * features, features);
      }
    }
    for (int64_t e = count; e < EDGES<T>; ++e) {
      std::copy_n(rows.data(), features, rows.data() + e * stride);
    }
  }
};

}  // namespace graphattn
