// Vectors of floats and doubles, as wide as the instruction set that this file is compiled for.
//
// Everything is written with the vector extensions of GCC and clang: the same lines become AVX-512,
// AVX2, SSE2 or NEON, and `+`, `*`, `<` and `? :` work lane by lane. Sources include this header and
// are built once per instruction set (setup.py). Nothing here relies on -ffast-math, which would
// take away the meaning of NaN and infinity and flush denormals in the whole process.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// A helper that is not inlined passes its vectors through memory; at -O3, too, GCC sometimes decides
// so.
#define GRAPHATTN_INLINE inline __attribute__((always_inline))
// What is long, or must have the same bits wherever it is called.
#define GRAPHATTN_NOINLINE __attribute__((noinline))

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GRAPHATTN_HAS_SHUFFLE 1
#endif
#endif
#ifndef GRAPHATTN_HAS_SHUFFLE
#define GRAPHATTN_HAS_SHUFFLE 0
#endif

namespace graphattn {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

// L lanes of T, and unsigned integers as wide as they are (unsigned: shifts and sums may wrap).
template <class T, int bytes = vector_bytes>
struct Vec {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  using Bit = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

  static constexpr int L = bytes / static_cast<int>(sizeof(T));
  typedef T type __attribute__((vector_size(bytes)));
  typedef Bit bits __attribute__((vector_size(bytes)));
};

template <class T>
using vec = typename Vec<T>::type;

// The type of a vector's lanes.
template <class V>
using lane_t = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V>()[0])>>;

// ---- Filling, loading, storing ----

// x - 0 is x for every x; 0 + x is not, for x = -0.
template <class T>
GRAPHATTN_INLINE vec<T> broadcast(T x) {
  return x - vec<T>{};
}

// 0, 1, 2, ...
template <class T>
GRAPHATTN_INLINE vec<T> lane_numbers() {
  vec<T> x{};
  for (int i = 0; i < Vec<T>::L; ++i) x[i] = static_cast<T>(i);
  return x;
}

// `memcpy` of a constant size is one unaligned load, and is allowed whatever lies there.
template <class T>
GRAPHATTN_INLINE vec<T> load(const T* from) {
  vec<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class V>
GRAPHATTN_INLINE void store(lane_t<V>* to, V x) {
  std::memcpy(to, &x, sizeof x);
}

// The first `count` lanes (0 <= count <= L) from memory, the others `rest`: the end of a row.
template <class T>
GRAPHATTN_INLINE vec<T> load_first(const T* from, int64_t count, T rest = 0) {
  vec<T> x = broadcast(rest);
  std::memcpy(&x, from, static_cast<size_t>(count) * sizeof(T));
  return x;
}

template <class V>
GRAPHATTN_INLINE void store_first(lane_t<V>* to, V x, int64_t count) {
  std::memcpy(to, &x, static_cast<size_t>(count) * sizeof(lane_t<V>));
}

// The same bytes as a vector of another type.
template <class To, class From>
GRAPHATTN_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- Between two vectors, and across one ----

// Lane by lane. Where b is NaN it is a, where a is NaN it is a: what has been found so far goes
// first.
template <class V>
GRAPHATTN_INLINE V maximum(V a, V b) {
  return a < b ? b : a;
}

template <class V>
GRAPHATTN_INLINE V minimum(V a, V b) {
  return b < a ? b : a;
}

// The lower or the upper half of a vector, as a vector of half the size.
template <bool upper, class V, size_t... I>
GRAPHATTN_INLINE auto half_of(V x, std::index_sequence<I...>) {
  typedef lane_t<V> Half __attribute__((vector_size(sizeof(V) / 2)));
  Half half;
#if GRAPHATTN_HAS_SHUFFLE
  half = __builtin_shufflevector(x, x, (upper ? I + sizeof...(I) : I)...);
#else
  std::memcpy(&half, reinterpret_cast<const char*>(&x) + (upper ? sizeof half : 0), sizeof half);
#endif
  return half;
}

// Halves are joined until one lane is left: a fixed order, and log2(L) steps instead of L - 1.
// (Vectors go by value: whose address is taken lies in memory, and a loop would add to it there.)
template <class V, class Join>
GRAPHATTN_INLINE lane_t<V> reduce(V x, const Join& join) {
  constexpr size_t half = sizeof(V) / sizeof(lane_t<V>) / 2;
  if constexpr (half == 1) {
    return join(x[0], x[1]);
  } else {
    constexpr auto lanes = std::make_index_sequence<half>();
    return reduce(join(half_of<false>(x, lanes), half_of<true>(x, lanes)), join);
  }
}

template <class V>
GRAPHATTN_INLINE lane_t<V> sum(V x) {
  return reduce(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

template <class V>
GRAPHATTN_INLINE lane_t<V> largest(V x) {
  return reduce(x, [](auto a, auto b) __attribute__((always_inline)) { return maximum(a, b); });
}

template <class V>
GRAPHATTN_INLINE lane_t<V> least_of(V x) {
  return reduce(x, [](auto a, auto b) __attribute__((always_inline)) { return minimum(a, b); });
}

// ---- The exponential ----

template <class T>
struct ExpNumbers;

template <>
struct ExpNumbers<float> {
  static constexpr float log2_e = 0x1.715476p+0f;
  static constexpr float ln2_high = 0x1.63p-1f;  // 9 bits: n times it is exact
  static constexpr float ln2_low = -0x1.bd0106p-13f;
  static constexpr float round_by = 0x1.8p+23f;        // x + it has no bits below 1
  static constexpr float lowest = -0x1.5d589ep+6f;     // exp is 2^-126, the least normal number
  static constexpr float highest = 0x1.62e42ep+6f;     // exp is finite; at the next one it is not
  static constexpr int mantissa_bits = 23;
  static constexpr int degree = 7;  // the next term is below 0.1 units in the last place
};

template <>
struct ExpNumbers<double> {
  static constexpr double log2_e = 0x1.71547652b82fep+0;
  static constexpr double ln2_high = 0x1.62e4p-1;  // 14 bits
  static constexpr double ln2_low = 0x1.7f7d1cf79abcap-20;
  static constexpr double round_by = 0x1.8p+52;
  static constexpr double lowest = -0x1.6232bdd7abcd2p+9;
  static constexpr double highest = 0x1.62e42fefa39efp+9;
  static constexpr int mantissa_bits = 52;
  static constexpr int degree = 13;
};

constexpr double inverse_factorial(int n) { return n < 2 ? 1.0 : inverse_factorial(n - 1) / n; }

// exp(x), within about 1 unit in the last place. Results below the least normal number are 0, above
// the largest infinity; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln(2) / 2, and exp(x) = 2^n exp(r). ln 2 is taken in two pieces, so
// that r keeps its bits; exp(r) is its Taylor series, 1 + (r + r^2 (1/2 + r/6 + ...)), the large
// terms last; 2^n is added to the bits of the exponent, where 2^128 is no overflow on the way to a
// finite result.
template <class V>
GRAPHATTN_INLINE V exp(V x) {
  using T = lane_t<V>;
  using Bits = typename Vec<T, sizeof(V)>::bits;
  using Numbers = ExpNumbers<T>;

  const V rounded = x * Numbers::log2_e + Numbers::round_by;
  const Bits exponent = bit_cast<Bits>(rounded) << Numbers::mantissa_bits;
  const V n = rounded - Numbers::round_by;
  const V r = (x - n * Numbers::ln2_high) - n * Numbers::ln2_low;

  V series = r * static_cast<T>(inverse_factorial(Numbers::degree)) +
             static_cast<T>(inverse_factorial(Numbers::degree - 1));
#pragma GCC unroll 16
  for (int k = Numbers::degree - 2; k >= 2; --k) {
    series = series * r + static_cast<T>(inverse_factorial(k));
  }
  const V of_r = ((series * r) * r + r) + T{1};
  const V scaled = bit_cast<V>(bit_cast<Bits>(of_r) + exponent);

  // What is not at most `highest` is too large or NaN; adding infinity keeps both apart.
  const V upper = x <= Numbers::highest ? scaled : x + std::numeric_limits<T>::infinity();
  return x < Numbers::lowest ? V{} : upper;
}

// ---- Memory ----

constexpr int64_t huge_page = int64_t{1} << 21;

// Asks for huge pages where a fresh output of at least 2 MB lies, before it is written. Otherwise
// each 4 KB of it costs a page fault on first touch, more than the arithmetic that fills it.
inline void huge(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < huge_page) return;
  const auto address = reinterpret_cast<uintptr_t>(start);
  const uintptr_t mask = huge_page - 1;
  const uintptr_t first = (address + mask) & ~mask;
  const uintptr_t last = (address + static_cast<uintptr_t>(bytes)) & ~mask;
  // It is advice: where the kernel cannot follow it, nothing is lost.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

// Starts to fetch what will be read soon; any address is allowed.
GRAPHATTN_INLINE void prefetch(const void* start) { __builtin_prefetch(start); }

GRAPHATTN_INLINE void prefetch(const void* start, int64_t bytes) {
  constexpr int64_t cache_line = 64;
  for (int64_t at = 0; at < bytes; at += cache_line) {
    // Into the second level: whole rows of features, fetched into the first, would push each other
    // out again (1.3 times the time of attention over random neighbours).
    __builtin_prefetch(static_cast<const char*>(start) + at, 0, 2);
  }
}

}  // namespace graphattn
