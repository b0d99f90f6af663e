// Products of matrices for a block of edges, which stand in the lanes of vectors.
//
// A block has two vectors of edges; a matrix [features, edges] of it has a row of that length for
// every feature. Weights are read as torch keeps them. A sum over features goes from the first to
// the last in every lane: what an edge gets does not depend on its place or on its neighbours.
#pragma once

#include <cstdint>

#include "simd.h"

namespace graphattn {

template <class T>
constexpr int64_t EDGES = 2 * Vec<T>::L;  // of a block
static_assert(EDGES<float> <= 32);        // calls.py: memory for whole blocks

// Rows of a result that are computed at a time: their sums stay in registers.
constexpr int TILE_ROWS = vector_bytes == 64 ? 8 : 6;

// out[r, e] = bias[r] + sum_k weight[r, k] x[k, e] for R rows, and V vectors of edges.
template <class T, int R, int V>
GRAPHATTN_INLINE void forward_tile(const T* weight, int64_t stride, const T* bias, int64_t count,
                                   const T* x, T* out) {
  constexpr int64_t L = Vec<T>::L;
  const T* row[R];
  vec<T> sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    row[r] = weight + r * stride;
    for (int v = 0; v < V; ++v) sums[r][v] = broadcast(bias[r]);
  }
  for (int64_t k = 0; k < count; ++k, x += EDGES<T>) {
    vec<T> of_edges[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) of_edges[v] = load(x + v * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vec<T> factor = broadcast(row[r][k]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] += factor * of_edges[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(out + r * EDGES<T> + v * L, sums[r][v]);
  }
}

// The same for any number of rows: weight [rows, count], x [count, edges], out [rows, edges].
template <class T, int V>
inline void forward_product(const T* weight, const T* bias, int64_t rows, int64_t count, const T* x,
                            T* out) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) {
    forward_tile<T, TILE_ROWS, V>(weight + r * count, count, bias + r, count, x, out + r * EDGES<T>);
  }
  for (; r + 2 <= rows; r += 2) {
    forward_tile<T, 2, V>(weight + r * count, count, bias + r, count, x, out + r * EDGES<T>);
  }
  if (r < rows) {
    forward_tile<T, 1, V>(weight + r * count, count, bias + r, count, x, out + r * EDGES<T>);
  }
}

// The same for one row, in four sums at a time: one would wait for itself.
template <class T, int V>
inline void forward_row(const T* weight, T bias, int64_t count, const T* x, T* out) {
  constexpr int64_t L = Vec<T>::L;
  constexpr int parts = 4;
  vec<T> sums[parts][V] = {};
  int64_t k = 0;
  for (; k + parts <= count; k += parts) {
#pragma GCC unroll 4
    for (int p = 0; p < parts; ++p) {
      const vec<T> factor = broadcast(weight[k + p]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[p][v] += factor * load(x + (k + p) * EDGES<T> + v * L);
    }
  }
  for (; k < count; ++k) {
    for (int v = 0; v < V; ++v) {
      sums[0][v] += broadcast(weight[k]) * load(x + k * EDGES<T> + v * L);
    }
  }
  for (int v = 0; v < V; ++v) {
    store(out + v * L, ((sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v])) + bias);
  }
}

// ---- The same weights in a backward pass ----

// out[k, e] = sum_r weight[r, k] x[r, e] for R columns k, and V vectors of edges; `again`: added.
template <class T, int R, int V>
GRAPHATTN_INLINE void backward_tile(const T* weight, int64_t stride, int64_t rows, const T* x,
                                    bool again, T* out) {
  constexpr int64_t L = Vec<T>::L;
  vec<T> sums[R][V] = {};
  for (int64_t r = 0; r < rows; ++r, x += EDGES<T>, weight += stride) {
    vec<T> of_edges[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) of_edges[v] = load(x + v * L);
#pragma GCC unroll 16
    for (int k = 0; k < R; ++k) {
      const vec<T> factor = broadcast(weight[k]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[k][v] += factor * of_edges[v];
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < R; ++k) {
    for (int v = 0; v < V; ++v) {
      T* to = out + k * EDGES<T> + v * L;
      store(to, again ? load(to) + sums[k][v] : sums[k][v]);
    }
  }
}

// The same for any number of columns: weight [rows, count], x [rows, edges], out [count, edges].
template <class T, int V>
inline void backward_product(const T* weight, int64_t rows, int64_t count, const T* x, bool again,
                             T* out) {
  int64_t k = 0;
  for (; k + TILE_ROWS <= count; k += TILE_ROWS) {
    backward_tile<T, TILE_ROWS, V>(weight + k, count, rows, x, again, out + k * EDGES<T>);
  }
  for (; k + 2 <= count; k += 2) {
    backward_tile<T, 2, V>(weight + k, count, rows, x, again, out + k * EDGES<T>);
  }
  if (k < count) backward_tile<T, 1, V>(weight + k, count, rows, x, again, out + k * EDGES<T>);
}

// total[r, k] += sum_e x[r, e] hidden[e, k] for R rows and two vectors of columns k.
template <class T, int R>
GRAPHATTN_INLINE void outer_tile(const T* x, const T* hidden, int64_t stride, int64_t edges,
                                 T* total) {
  constexpr int64_t L = Vec<T>::L;
  vec<T> sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2; ++v) sums[r][v] = load(total + r * EDGES<T> + v * L);
  }
  for (int64_t e = 0; e < edges; ++e, hidden += stride) {
    const vec<T> first = load(hidden), second = load(hidden + L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vec<T> factor = broadcast(x[r * EDGES<T> + e]);
      sums[r][0] += factor * first, sums[r][1] += factor * second;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < 2; ++v) store(total + r * EDGES<T> + v * L, sums[r][v]);
  }
}

// The same for any number of rows: x [rows, EDGES], hidden [edges, stride]. Of the total, two
// vectors of columns of all its rows stand together, and `panel` numbers further on the next two:
// [columns / EDGES, all rows, EDGES]. Hidden vectors can be read up to whole pairs of vectors.
template <class T>
inline void outer_product(const T* x, int64_t rows, const T* hidden, int64_t stride, int64_t edges,
                          T* total, int64_t panel, int64_t columns) {
  for (int64_t k = 0; k < columns; k += EDGES<T>, total += panel) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS) {
      outer_tile<T, TILE_ROWS>(x + r * EDGES<T>, hidden + k, stride, edges, total + r * EDGES<T>);
    }
    for (; r < rows; ++r) {
      outer_tile<T, 1>(x + r * EDGES<T>, hidden + k, stride, edges, total + r * EDGES<T>);
    }
  }
}

}  // namespace graphattn
