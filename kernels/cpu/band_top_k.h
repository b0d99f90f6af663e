// The k largest logits of a row, in vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "band_tiles.h"
#include "feature_sums.h"
#include "simd.h"

namespace graphattn {

template <class T>
GRAPHATTN_INLINE T number_of(Ordered<T> order) {
  const Ordered<T> sign = order >> (8 * sizeof order - 1);
  order ^= sign & std::numeric_limits<Ordered<T>>::max();
  T x;
  std::memcpy(&x, &order, sizeof x);
  return x;
}

// How many of `count` numbers, whole vectors, are at least so large.
template <class T>
GRAPHATTN_INLINE int64_t count_from(const Ordered<T>* order, int64_t count, Ordered<T> least) {
  const orders<T> limit = orders<T>{} + least;
  orders<T> found{};
  for (int64_t e = 0; e < count; e += Vec<T>::L) found -= load_orders<T>(order + e) >= limit;
  return static_cast<int64_t>(sum(found));
}

// Which logits are kept: those above the threshold, and those equal to it up to place `last`. The
// largest of the others is `next`.
template <class T>
struct Largest {
  T threshold, next;
  int64_t last;
};

// The k largest, of equal ones the first. The threshold is found by bisection of integers that are
// ordered as the numbers are, most steps as if the numbers were spread evenly.
template <class T>
GRAPHATTN_NOINLINE Largest<T> find_largest(const T* logit, int64_t count, int64_t k,
                                           Ordered<T>* order) {
  using O = Ordered<T>;
  using Unsigned = std::make_unsigned_t<O>;
  constexpr T NONE = -std::numeric_limits<T>::infinity();
  constexpr int64_t EVERYONE = std::numeric_limits<int64_t>::max();
  const O none = ordered(NONE);
  constexpr int SIGN = 8 * sizeof(O) - 1;
  constexpr O least = std::numeric_limits<O>::min(), greatest = std::numeric_limits<O>::max();
  orders<T> lowest = orders<T>{} + greatest, highest = orders<T>{} + least, above{};
  for (int64_t e = 0; e < count; e += Vec<T>::L) {
    orders<T> bits = bit_cast<orders<T>>(load(logit + e) + T(0));  // -0 + 0 is 0
    bits ^= (bits >> SIGN) & greatest;
    std::memcpy(order + e, &bits, sizeof bits);
    const orders<T> is_some = bits > none;
    above -= is_some;
    highest = maximum(highest, bits);
    lowest = minimum(lowest, is_some ? bits : orders<T>{} + greatest);
  }
  const O low = least_of(lowest);
  const O high = largest(highest);
  const int64_t some = sum(above);
  if (some <= k) return {NONE, NONE, EVERYONE};
  // So many are at least `from`, and so many at least `to`.
  O from = low, to = high;
  int64_t of_from = some, of_to = count_from<T>(order, count, high);
  if (of_to >= k) from = high, of_from = of_to;
  // Unsigned: the difference of two integers of either sign may be beyond the signed ones.
  const auto gap = [&] { return static_cast<Unsigned>(to) - static_cast<Unsigned>(from); };
  for (int step = 0; from < to && gap() > 1 && of_from != k; ++step) {
    O middle = static_cast<O>(static_cast<Unsigned>(from) + gap() / 2);
    if (step % 3 != 2) {
      const T a = number_of<T>(from), z = number_of<T>(to);
      const T share = (T(of_from - k) + T(0.5)) / T(of_from - of_to + 1);
      const O guess = ordered(a + (z - a) * share);
      if (guess > from && guess < to) middle = guess;
    }
    const int64_t found = count_from<T>(order, count, middle);
    if (found >= k) {
      from = middle, of_from = found;
    } else {
      to = middle, of_to = found;
    }
  }
  const T threshold = number_of<T>(from);
  if (of_from == k) {  // then `from` lies between the two
    orders<T> above_it = orders<T>{} + greatest, below_it = orders<T>{} + none;
    for (int64_t e = 0; e < count; e += Vec<T>::L) {
      const orders<T> own = load_orders<T>(order + e);
      above_it = minimum(above_it, own < from ? above_it : own);
      below_it = maximum(below_it, own < from ? own : below_it);
    }
    return {number_of<T>(least_of(above_it)), number_of<T>(largest(below_it)), EVERYONE};
  }
  int64_t left = k;
  if (from < greatest) left -= count_from<T>(order, count, from + 1);
  for (int64_t e = 0; e < count; ++e) {
    if (order[e] == from && --left == 0) return {threshold, threshold, e};
  }
  return {threshold, threshold, EVERYONE};
}

}  // namespace graphattn
