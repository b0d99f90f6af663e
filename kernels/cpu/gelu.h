// The exact GELU and its derivative, softplus and its derivative, lane by lane.
//
// gelu(x) = x Phi(x), Phi being the normal distribution function. The error of Phi is that of one
// rounding near 1 (about 1e-8 more for floats): as torch's, whose 1 + erf has that of 1 wherever Phi
// is small.
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

namespace graphattn {

// log2(2 Phi(-t)) / t is a polynomial of s = 2 t / highest - 1 on 0 <= t <= highest, fitted to the
// least error of t Phi(-t) (Lawson's iteration in 60 digits); beyond, t Phi(-t) is 0 after rounding.
// `power` is a polynomial of 2^x on |x| <= 1/2.
template <class T>
struct NormalNumbers;

template <>
struct NormalNumbers<float> {
  static constexpr float highest = 5.6f;
  static constexpr float round_by = 0x1.8p+23f;  // x + it has no bits below 1
  static constexpr int mantissa_bits = 23;
  static constexpr float tail[] = {
      -0x1.5bfeb6p+1f, -0x1.c02460p+0f, -0x1.ceeb8ep-4f, 0x1.7dc018p-5f,
      -0x1.24d210p-6f, 0x1.852552p-10f, -0x1.ff294ap-8f, -0x1.f5564cp-9f,
  };
  static constexpr float power[] = {
      1.0f,           0x1.62e430p-1f,  0x1.ebfbdap-3f,  0x1.c6aed4p-5f,
      0x1.3b2dbcp-7f, 0x1.5f4568p-10f, 0x1.41d2a2p-13f,
  };
  static constexpr int log_terms = 8;  // the next is below 0.1 units in the last place
};

template <>
struct NormalNumbers<double> {
  static constexpr double highest = 8.4;
  static constexpr double round_by = 0x1.8p+52;
  static constexpr int mantissa_bits = 52;
  static constexpr double tail[] = {
      -0x1.cf085e7c0007cp+1, -0x1.608fd2f944250p+1,  -0x1.27309585f4621p-3,
      0x1.371effec21ec2p-4,  -0x1.3dc264983c762p-5,  0x1.31c129d92ed0ep-6,
      -0x1.0b0388e083925p-7, 0x1.862729817fe47p-9,   -0x1.6aafd6034c95cp-11,
      -0x1.11228b37327a7p-13, 0x1.41bb26f55dfd2p-11, -0x1.90eaa77089816p-15,
      -0x1.03d681507965cp-12, -0x1.2ee293f8b7218p-9, -0x1.7435a9f62d32fp-9,
      -0x1.294fa2c54b15cp-13, 0x1.457af19363edap-8,  0x1.f82f3112230fcp-8,
      0x1.80e201d9cbdccp-8,   0x1.3be6f0b59bd16p-9,  0x1.b5fe408e1bd57p-12,
  };
  static constexpr double power[] = {
      1.0,
      0x1.62e42fefa39efp-1,
      0x1.ebfbdff82c5adp-3,
      0x1.c6b08d7049fd0p-5,
      0x1.3b2ab6fb9f413p-7,
      0x1.5d87fe78cf2cbp-10,
      0x1.43091310bf4f9p-13,
      0x1.ffcbfba79d785p-17,
      0x1.62bfc3c2072d5p-20,
      0x1.b52678c1e72b3p-24,
      0x1.e620fb126663ep-28,
      0x1.e7a9bf628f359p-32,
  };
  static constexpr int log_terms = 17;
};

// c[0] + c[1] x + ...
template <class V, class T, size_t n>
GRAPHATTN_INLINE V polynomial(V x, const T (&c)[n]) {
  V sum = broadcast(c[n - 1]);
#pragma GCC unroll 32
  for (int k = static_cast<int>(n) - 2; k >= 0; --k) sum = sum * x + c[k];
  return sum;
}

// -|x|, also of -0 and NaN.
template <class V>
GRAPHATTN_INLINE V minus_size(V x) {
  using Bits = typename Vec<lane_t<V>, sizeof(V)>::bits;
  const Bits sign = bit_cast<Bits>(broadcast(lane_t<V>(-0.0)));
  return bit_cast<V>(bit_cast<Bits>(x) | sign);
}

// 2^p for p between -126 and 0; elsewhere some number.
template <class V>
GRAPHATTN_INLINE V power_of_two(V p) {
  using T = lane_t<V>;
  using Bits = typename Vec<T, sizeof(V)>::bits;
  using Numbers = NormalNumbers<T>;
  const V rounded = p + Numbers::round_by;
  const Bits exponent = bit_cast<Bits>(rounded) << Numbers::mantissa_bits;
  const V power = polynomial(p - (rounded - Numbers::round_by), Numbers::power);
  return bit_cast<V>(bit_cast<Bits>(power) + exponent);
}

// Phi(x); of NaN some number.
template <class V>
GRAPHATTN_INLINE V normal_distribution(V x) {
  using T = lane_t<V>;
  using Numbers = NormalNumbers<T>;
  const V t = -minus_size(x);
  const V q = polynomial(t * (T(2) / Numbers::highest) - T(1), Numbers::tail);
  const V found = power_of_two(t * q - T(1));
  const V tail = t <= Numbers::highest ? found : V{};
  return x < T(0) ? tail : T(1) - tail;
}

template <class V>
GRAPHATTN_INLINE V gelu(V x) {
  return x * normal_distribution(x);
}

// gelu'(x), from Phi(x). (Where Phi is 0 or 1 after rounding, x times the density is 0, too.)
template <class V>
GRAPHATTN_INLINE V gelu_derivative(V x, V distribution) {
  using T = lane_t<V>;
  constexpr T half_log2_e = T(0.721347520444481703679970437060);
  constexpr T density_at_0 = T(0.398942280401432677939946059934);
  const V square = x * x;
  const V found = power_of_two(square * -half_log2_e);
  const V density =
      square <= NormalNumbers<T>::highest * NormalNumbers<T>::highest ? found : V{};
  return distribution + x * (density_at_0 * density);
}

constexpr double softplus_threshold = 20;  // torch's: beyond, softplus(x) is x

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), and log1p(y) = 2 artanh(y / (2 + y)).
template <class V>
GRAPHATTN_INLINE V softplus(V x) {
  using T = lane_t<V>;
  const V y = exp(minus_size(x));
  const V z = y / (y + T(2)), square = z * z;
  V series = V{};
#pragma GCC unroll 32
  for (int k = NormalNumbers<T>::log_terms - 1; k > 0; --k) {
    series = (series + T(1) / T(2 * k + 1)) * square;
  }
  const V found = (x > T(0) ? x : V{}) + T(2) * z * (series + T(1));
  // (What is not at most the threshold is larger or NaN.)
  return x <= T(softplus_threshold) ? found : x;
}

// The derivative of softplus.
template <class V>
GRAPHATTN_INLINE V softplus_derivative(V x) {
  using T = lane_t<V>;
  const V y = exp(minus_size(x));
  const V found = (x < T(0) ? y : broadcast(T(1))) / (y + T(1));
  return x > T(softplus_threshold) ? broadcast(T(1)) : found;
}

}  // namespace graphattn
