// Points before they are searched: which are finite, which are copies of others, how large they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "simd.h"

namespace graphattn {

// Coordinates are multiplied by a power of two, so that the largest is of this order: its square
// does not overflow, and those of small ones do not vanish.
template <class T>
constexpr int LARGEST_EXPONENT = sizeof(T) == 4 ? 50 : 400;

template <class T>
bool is_finite_row(const T* x, int64_t width) {
  constexpr int64_t L = Vec<T>::L;
  vec<T> zeros{};  // 0 times what is not finite is NaN, and stays so
  int64_t c = 0;
  for (; c + L <= width; c += L) zeros += load(x + c) * T(0);
  T zero = sum(zeros);
  for (; c < width; ++c) zero += x[c] * T(0);
  return zero == T(0);
}

// The largest finite coordinate, without its sign.
template <class T>
double largest_coordinate(const T* x, int64_t count) {
  constexpr int64_t L = Vec<T>::L;
  const vec<T> most = broadcast(std::numeric_limits<T>::max());
  vec<T> found{};
  for (int64_t i = 0; i < count; i += L) {
    const vec<T> given = count - i < L ? load_first(x + i, count - i) : load(x + i);
    const vec<T> size = maximum(given, -given);
    found = maximum(found, size <= most ? size : vec<T>{});
  }
  return largest(found);
}

template <class T>
double largest_coordinate(const T* x, int64_t rows, const T* others, int64_t other_rows,
                          int64_t width) {
  const double found = largest_coordinate(x, rows * width);
  return x == others ? found : std::max(found, largest_coordinate(others, other_rows * width));
}

template <class T>
int scale_exponent(double largest) {
  return largest > 0 ? std::min(LARGEST_EXPONENT<T> - std::ilogb(largest), 1000) : 0;
}

// Places of rows that are finite.
template <class T>
std::vector<int32_t> finite_rows(const T* x, int64_t rows, int64_t width) {
  std::vector<int32_t> found(static_cast<size_t>(rows));
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    found[static_cast<size_t>(count)] = static_cast<int32_t>(i);
    count += is_finite_row(x + i * width, width);
  }
  found.resize(static_cast<size_t>(count));
  return found;
}

// A number that equal points have in common, and few others: -0 is 0.
template <class T>
uint64_t hash_of(const T* x, int64_t width) {
  using Bits = typename Vec<T>::bits;
  using Bit = typename Vec<T>::Bit;
  constexpr int64_t L = Vec<T>::L;
  constexpr auto odd = static_cast<Bit>(0x9e3779b97f4a7c15);
  Bits found = bit_cast<Bits>(lane_numbers<T>() + T(1));
  for (int64_t c = 0; c < width; c += L) {
    const vec<T> given = width - c < L ? load_first(x + c, width - c) : load(x + c);
    found = (found ^ bit_cast<Bits>(given + T(0))) * odd;
    found ^= found >> (4 * sizeof(T));
  }
  return static_cast<uint64_t>(sum(found * odd)) * 0x9e3779b97f4a7c15;
}

// Of rows that are equal only the first `copies`: whoever looks for fewer neighbours needs no more.
template <class T>
std::vector<int32_t> first_copies(const T* x, const std::vector<int32_t>& rows, int64_t width,
                                  int64_t copies) {
  struct Seen {
    int32_t row, count;
  };
  int bits = 1;
  while ((size_t{1} << bits) < 2 * rows.size()) ++bits;
  std::vector<Seen> table(size_t{1} << bits, Seen{-1, 0});  // open addressing, at most half full
  const size_t mask = table.size() - 1;
  std::vector<int32_t> kept;
  kept.reserve(rows.size());
  for (const int32_t row : rows) {
    const T* own = x + row * width;
    size_t slot = hash_of(own, width) >> (64 - bits);
    while (table[slot].row >= 0 && !std::equal(own, own + width, x + table[slot].row * width)) {
      slot = (slot + 1) & mask;
    }
    if (table[slot].row < 0) table[slot].row = row;
    if (table[slot].count >= copies) continue;
    ++table[slot].count;
    kept.push_back(row);
  }
  return kept;
}

}  // namespace graphattn
