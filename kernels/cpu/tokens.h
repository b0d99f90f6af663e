// What a row does with the tokens of its edges, all their heads.
//
// These loops take nearly all the time of a call, so they are compiled once for every usual number
// of features (tokens.cpp). Everything around them is compiled once, and calls them by a pointer.
#pragma once

#include <cstdint>

#include "rows.h"
#include "simd.h"

namespace graphattn {

// What the heads of a token have: a query head has its key head's where `query_head` is 0.
template <class T>
struct Heads {
  T* first;
  int64_t query_head, key_head;  // numbers between two

  GRAPHATTN_INLINE T* at(int64_t h, int64_t g) const { return first + h * query_head + g * key_head; }
};

// A token, and those at the other ends of some of its edges.
template <class T>
struct TokenLoop {
  int64_t key_heads, repeats;  // repeats: query heads of a key head
  int64_t width;
  int64_t stride;              // numbers between two tokens
  int64_t edges;               // numbers between two query heads of what edges have
  const uint8_t* silent;       // [query heads]: which are left out; null: none
  Heads<const T> own;          // features of the token itself
  Heads<const T> tokens;       // features of token 0
  const int32_t *token, *next;  // [count], [next_count]: `next` are fetched meanwhile
  int64_t count, next_count;
};

template <class T>
struct TokenLoops {
  // found[h, e] = own[h] . token[e]
  using Products = void(const TokenLoop<T>& loop, T* found);
  // into[h] = the sum of factor[h, e] token[e] over the edges whose state[h, e] is not at most
  // `counts_above`; query heads that share `into` are summed up. With a `block` of `width` numbers,
  // every sum is made there, and added to what `into` holds.
  using Sums = void(const TokenLoop<T>& loop, const T* factor, const T* state, T counts_above,
                    const Heads<T>& into, T* block);

  Products *products, *affinities;  // affinities: with RBF -|own - token|^2 / 2
  Sums *sums, *pulls;               // pulls: with RBF of factor (token - own)
};

// The loops over tokens of so many features.
template <class T>
TokenLoops<T> token_loops(int64_t width, int64_t value_width, bool is_rbf);

}  // namespace graphattn
