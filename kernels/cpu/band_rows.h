// One row of a band edge by edge and in double precision: for the few rows of which tiles would
// lose something.
//
// Those see NaN, infinity or enormous numbers (tiles hold zeros in their place), or their top-k is
// nearly a tie, or all their RBF logits are so far below zero that those of float have too few
// digits. What they find is nobody else's, and the other rows have the bits they would have anyway.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "bands.h"
#include "feature_sums.h"
#include "precision.h"
#include "simd.h"

namespace graphattn {

// Vec<double>::L numbers as doubles.
template <class T>
GRAPHATTN_INLINE vec<double> load_doubles(const T* from) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return load(from);
  } else {
    typedef T Few __attribute__((vector_size(vector_bytes / 2)));
    Few few;
    std::memcpy(&few, from, sizeof few);
    return __builtin_convertvector(few, vec<double>);
  }
}

// The dot product of two rows, or with RBF -|a - b|^2 / 2.
template <class T, bool RBF>
GRAPHATTN_INLINE double affinity_in_double(const T* a, const T* b, int64_t width) {
  constexpr int64_t L = Vec<double>::L;
  vec<double> sums{};
  int64_t d = 0;
  for (; d + L <= width; d += L) {
    const vec<double> x = load_doubles(a + d), y = load_doubles(b + d), difference = x - y;
    sums += RBF ? difference * difference : x * y;
  }
  double found = sum(sums);
  for (; d < width; ++d) {
    const double x = a[d], y = b[d];
    found += RBF ? (x - y) * (x - y) : x * y;
  }
  return RBF ? found / -2 : found;
}

template <class T>
class BandRow {
 public:
  explicit BandRow(const BandsCall& call)
      : call_(call), room_width_(std::max(call.width, call.value_width)),
        rooms_(static_cast<size_t>(3 * room_width_)) {}

  // Output and log-sum of target i of a sequence.
  void forward(int64_t b, const Sequence& sequence, int64_t i, int64_t h) {
    const double lse = weigh(b, sequence, i, h);
    sums_.assign(static_cast<size_t>(call_.value_width), 0.0);
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      const T* value = read_head(call_.value, b, sources_[e], group_, call_.value_width, room(0));
      for (size_t d = 0; d < sums_.size(); ++d) sums_[d] += weight_[e] * double(value[d]);
    }
    put_sums(call_.out, b, h);
    static_cast<T*>(call_.lse)[(b * call_.targets + target_) * call_.heads + h] = T(lse);
  }

  // The query's gradient is written, all others are added to; `d_table` is that of this head.
  void backward(const BandsGradients& wanted, int64_t b, const Sequence& sequence, int64_t i,
                int64_t h, double& d_scale, double* d_table) {
    weigh(b, sequence, i, h);
    const int64_t width = call_.width, value_width = call_.value_width;
    const double scale = static_cast<const T*>(call_.scale)[h], cap = call_.softcap;
    const T* query = read_head(call_.query, b, target_, h, width, room(1));
    const T* d_out = read_head(wanted.d_out, b, target_, h, value_width, room(2));
    sums_.assign(static_cast<size_t>(width), 0.0);
    d_weight_.resize(sources_.size());
    double mean = 0;
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      const T* value = read_head(call_.value, b, sources_[e], group_, value_width, room(0));
      d_weight_[e] = affinity_in_double<T, false>(d_out, value, value_width);
      mean += weight_[e] * d_weight_[e];
    }
    const T* d_lse = static_cast<const T*>(wanted.d_lse);
    if (d_lse) mean -= double(d_lse[(b * call_.targets + target_) * call_.heads + h]);
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      double found = weight_[e] * (d_weight_[e] - mean);
      if (d_table) d_table[hops_[e]] += found;
      if (cap > 0) {
        const double bounded = std::tanh(scale * affinity_[e] / cap);
        found *= 1 - bounded * bounded;
      }
      d_scale += found * affinity_[e];
      const double pull = scale * found;
      const T* key = read_head(call_.key, b, sources_[e], group_, width, room(0));
      T* d_key = at<T>(wanted.d_key, b, sources_[e], group_);
      T* d_value = at<T>(wanted.d_value, b, sources_[e], group_);
      for (int64_t d = 0; d < width; ++d) {
        const double q = query[d], k = key[d];
        sums_[d] += pull * (call_.is_rbf ? k - q : k);
        d_key[d] += T(pull * (call_.is_rbf ? q - k : q));
      }
      for (int64_t d = 0; d < value_width; ++d) d_value[d] += T(weight_[e] * double(d_out[d]));
    }
    put_sums(wanted.d_query, b, h);
  }

 private:
  static constexpr double NONE = -std::numeric_limits<double>::infinity();

  T* room(int64_t n) { return rooms_.data() + n * room_width_; }

  // The sums are the target's row of an output.
  void put_sums(const TokenView& view, int64_t b, int64_t h) {
    row_.resize(sums_.size());
    std::copy(sums_.begin(), sums_.end(), row_.begin());
    write_head(row_.data(), static_cast<int64_t>(row_.size()), view, b, target_, h);
  }

  // Fills the vectors with the row's edges; returns its log-sum.
  double weigh(int64_t b, const Sequence& s, int64_t i, int64_t h) {
    group_ = h / (call_.heads / call_.kv_heads);
    target_ = s.target + i * s.step;
    sources_.clear(), hops_.clear();
    const int64_t end = std::min(s.sources, i + s.after + 1);
    for (int64_t j = std::max<int64_t>(0, i - s.before); j < end; ++j) {
      if (s.loops != 1 && j - i == -s.loops / 2) continue;
      const int64_t token = s.source + j * s.step;
      if (call_.valid_sources && !call_.valid_sources[b * call_.sources + token]) continue;
      sources_.push_back(token), hops_.push_back(j - i);
    }
    const size_t count = sources_.size();
    affinity_.resize(count), weight_.resize(count), kept_.assign(count, 1);
    const double scale = static_cast<const T*>(call_.scale)[h], cap = call_.softcap;
    const T* table = static_cast<const T*>(call_.table);
    const T* query = read_head(call_.query, b, target_, h, call_.width, room(1));
    for (size_t e = 0; e < count; ++e) {
      const T* key = read_head(call_.key, b, sources_[e], group_, call_.width, room(0));
      affinity_[e] = call_.is_rbf ? affinity_in_double<T, true>(query, key, call_.width)
                                  : affinity_in_double<T, false>(query, key, call_.width);
      weight_[e] = scale * affinity_[e];
      if (cap > 0) weight_[e] = cap * std::tanh(weight_[e] / cap);
      if (table) weight_[e] += double(table[(call_.origin + hops_[e]) * call_.heads + h]);
    }
    if (call_.top_k > 0 && call_.top_k < static_cast<int64_t>(count)) keep_largest();
    double highest = NONE;
    bool empty = true;
    for (size_t e = 0; e < count; ++e) {
      if (!kept_[e]) continue;
      empty = empty && weight_[e] == NONE;
      highest = highest < weight_[e] ? weight_[e] : highest;
    }
    if (empty) {
      kept_.assign(count, 0);
      return NONE;
    }
    double whole = 0;
    for (size_t e = 0; e < count; ++e) {
      if (kept_[e]) whole += weight_[e] = std::exp(weight_[e] - highest);
    }
    for (size_t e = 0; e < count; ++e) weight_[e] /= whole;
    return highest + std::log(whole);
  }

  void keep_largest() {
    order_.resize(weight_.size());
    for (size_t e = 0; e < weight_.size(); ++e) order_[e] = ordered(weight_[e]);
    const auto begin = order_.begin(), kth = begin + call_.top_k - 1;
    std::nth_element(begin, kth, order_.end(), std::greater<int64_t>());
    const int64_t threshold = *kth;
    int64_t ties =
        call_.top_k - std::count_if(begin, kth + 1, [=](auto x) { return x > threshold; });
    for (size_t e = 0; e < weight_.size(); ++e) {
      const int64_t own = ordered(weight_[e]);
      const bool tied = own == threshold && ties > 0;
      ties -= tied;
      kept_[e] = (own > threshold || tied) && weight_[e] != NONE;
    }
  }

  const BandsCall& call_;
  const int64_t room_width_;
  int64_t group_ = 0, target_ = 0;
  std::vector<T> rooms_, row_;  // rooms_: a key or value, the query, d_out, where those are halves
  std::vector<int64_t> sources_, hops_, order_;
  std::vector<double> affinity_, weight_, d_weight_, sums_;
  std::vector<uint8_t> kept_;
};

}  // namespace graphattn
