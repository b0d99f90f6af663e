// Half precision: rows of features that are read as floats, and written from them.
//
// All arithmetic is in float. GCC has no type for halves in C++ before version 13: float16 takes the
// two instructions that x86 has for it, and integers elsewhere, which give the same numbers. Neither
// cares whether denormals are flushed.
#pragma once

#include <cstdint>
#include <cstring>

#include "band_tiles.h"
#include "feature_sums.h"
#include "rows.h"
#include "simd.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace graphattn {

typedef uint16_t halves __attribute__((vector_size(vector_bytes / 2)));
typedef int32_t signed_bits __attribute__((vector_size(vector_bytes)));
using bits = Vec<float>::bits;

constexpr uint32_t FLOAT_SIZE = 0x7fffffff, FLOAT_INFINITY = 0x7f800000;
constexpr uint32_t HALF_SIZE = 0x7fff, HALF_SIGN = 0x8000, HALF_INFINITY = 0x7c00;
constexpr uint32_t HALF_NORMAL = 0x400;           // the least number with all its digits
constexpr uint32_t HALF_NAN = 0x7e00;
constexpr uint32_t EXPONENTS = (127 - 15) << 23;  // between those of the two, in a float

GRAPHATTN_INLINE vec<float> of_bfloat16(halves x) {
  return bit_cast<vec<float>>(__builtin_convertvector(x, bits) << 16);
}

// To the nearest, of two equally near ones the even one, as torch rounds.
GRAPHATTN_INLINE halves to_bfloat16(vec<float> x) {
  const bits all = bit_cast<bits>(x), rounded = (all + 0x7fff + (all >> 16 & 1)) >> 16;
  const bits found = (all & FLOAT_SIZE) > FLOAT_INFINITY ? (all >> 16 | 0x40) : rounded;
  return __builtin_convertvector(found, halves);
}

#if defined(__AVX512F__)

// (Of the plain forms GCC 12 says that they read what nobody has set.)
constexpr __mmask16 EVERY = 0xffff;

GRAPHATTN_INLINE vec<float> of_float16(halves x) {
  return bit_cast<vec<float>>(_mm512_maskz_cvtph_ps(EVERY, bit_cast<__m256i>(x)));
}

GRAPHATTN_INLINE halves to_float16(vec<float> x) {
  return bit_cast<halves>(_mm512_maskz_cvtps_ph(EVERY, bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__) && defined(__AVX2__)

GRAPHATTN_INLINE vec<float> of_float16(halves x) {
  return bit_cast<vec<float>>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
}

GRAPHATTN_INLINE halves to_float16(vec<float> x) {
  return bit_cast<halves>(_mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}

#else

GRAPHATTN_INLINE vec<float> of_float16(halves x) {
  const bits all = __builtin_convertvector(x, bits), size = all & HALF_SIZE;
  const bits normal = (size << 13) + EXPONENTS;
  const vec<float> tiny = __builtin_convertvector(bit_cast<signed_bits>(size), vec<float>) * 0x1p-24f;
  const bits large = size < HALF_INFINITY ? normal : normal + EXPONENTS;
  const bits found = size < HALF_NORMAL ? bit_cast<bits>(tiny) : large;
  return bit_cast<vec<float>>(found | (all & HALF_SIGN) << 16);
}

GRAPHATTN_INLINE halves to_float16(vec<float> x) {
  const bits all = bit_cast<bits>(x), size = all & FLOAT_SIZE;
  const bits normal = (size - EXPONENTS + 0xfff + (size >> 13 & 1)) >> 13;
  // The last digit of a sum with 1/2 is worth as much as that of numbers below HALF_NORMAL.
  const bits tiny = bit_cast<bits>(bit_cast<vec<float>>(size) + 0.5f) - 0x3f000000;
  bits found = size < EXPONENTS + (1u << 23) ? tiny : normal;
  found = size < EXPONENTS + (31u << 23) ? found : bits{} + HALF_INFINITY;
  found = size > FLOAT_INFINITY ? bits{} + HALF_NAN : found;
  return __builtin_convertvector(found | (all >> 16 & HALF_SIGN), halves);
}

#endif

GRAPHATTN_NOINLINE inline void widen(const uint16_t* from, bool is_float16, int64_t width, float* to) {
  constexpr int64_t L = Vec<float>::L;
  halves x;
  int64_t d = 0;
  for (; d + L <= width; d += L) {
    std::memcpy(&x, from + d, sizeof x);
    store(to + d, is_float16 ? of_float16(x) : of_bfloat16(x));
  }
  if (d == width) return;
  x = halves{};
  std::memcpy(&x, from + d, static_cast<size_t>(width - d) * sizeof(uint16_t));
  store_first(to + d, is_float16 ? of_float16(x) : of_bfloat16(x), width - d);
}

GRAPHATTN_NOINLINE inline void narrow(const float* from, bool is_float16, int64_t width, uint16_t* to) {
  constexpr int64_t L = Vec<float>::L;
  halves x;
  int64_t d = 0;
  for (; d + L <= width; d += L) {
    x = is_float16 ? to_float16(load(from + d)) : to_bfloat16(load(from + d));
    std::memcpy(to + d, &x, sizeof x);
  }
  if (d == width) return;
  const vec<float> rest = load_first(from + d, width - d);
  x = is_float16 ? to_float16(rest) : to_bfloat16(rest);
  std::memcpy(to + d, &x, static_cast<size_t>(width - d) * sizeof(uint16_t));
}

// ---- Tokens of either precision ----

template <class T>
GRAPHATTN_INLINE bool is_half(const TokenView& view) {
  return sizeof(T) == sizeof(float) && view.kind != AS_COMPUTED;
}

template <class T>
GRAPHATTN_INLINE int64_t bytes_of(const TokenView& view, int64_t numbers) {
  return numbers * static_cast<int64_t>(is_half<T>(view) ? sizeof(uint16_t) : sizeof(T));
}

// Starts to fetch one head of a token.
template <class T>
GRAPHATTN_INLINE void fetch_head(const TokenView& view, int64_t b, int64_t token, int64_t head,
                                 int64_t width) {
  const void* start = is_half<T>(view)
                          ? static_cast<const void*>(at<const uint16_t>(view, b, token, head))
                          : static_cast<const void*>(at<const T>(view, b, token, head));
  prefetch(start, bytes_of<T>(view, width));
}

// One head of a token where it lies, or as floats in `room`.
template <class T>
GRAPHATTN_INLINE const T* read_head(const TokenView& view, int64_t b, int64_t token, int64_t head,
                                    int64_t width, T* room) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (is_half<T>(view)) {
      widen(at<const uint16_t>(view, b, token, head), view.kind == FLOAT16, width, room);
      return room;
    }
  }
  return at<const T>(view, b, token, head);
}

template <class T>
GRAPHATTN_INLINE void write_head(const T* x, int64_t width, const TokenView& view, int64_t b,
                                 int64_t token, int64_t head) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (is_half<T>(view)) {
      narrow(x, view.kind == FLOAT16, width, at<uint16_t>(view, b, token, head));
      return;
    }
  }
  put_row(x, width, at<T>(view, b, token, head), width);
}

}  // namespace graphattn
