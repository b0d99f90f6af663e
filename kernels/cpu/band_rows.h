// One row of a band edge by edge: for the few rows that see NaN, infinity or enormous numbers.
//
// Tiles hold zeros in the place of those, and rows that see one are computed here, from the numbers
// as they are: what they find is nobody else's, and the other rows have the bits they would have
// anyway.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "bands.h"
#include "features.h"

namespace graphattn {

template <class T, bool RBF>
class BandRow {
 public:
  explicit BandRow(const BandsCall& call) : call_(call) {}

  // Output and log-sum of target i of a sequence.
  void forward(int64_t b, const Sequence& sequence, int64_t i, int64_t h) {
    const T lse = weigh(b, sequence, i, h);
    T* out = at<T>(call_.out, b, target_, h);
    std::fill_n(out, call_.value_width, T(0));
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      add<T, 0>(out, weight_[e], at<T>(call_.value, b, sources_[e], group_), call_.value_width);
    }
    static_cast<T*>(call_.lse)[(b * call_.targets + target_) * call_.heads + h] = lse;
  }

  // The query's gradient is written, all others are added to; `d_table` is that of this head.
  void backward(const BandsGradients& wanted, int64_t b, const Sequence& sequence, int64_t i,
                int64_t h, double& d_scale, double* d_table) {
    weigh(b, sequence, i, h);
    const int64_t width = call_.width, value_width = call_.value_width;
    const T scale = static_cast<const T*>(call_.scale)[h], cap = T(call_.softcap);
    const T* query = at<const T>(call_.query, b, target_, h);
    const T* d_out = at<const T>(wanted.d_out, b, target_, h);
    T* d_query = at<T>(wanted.d_query, b, target_, h);
    std::fill_n(d_query, width, T(0));
    d_weight_.resize(sources_.size());
    double mean = 0;
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      const T* value = at<const T>(call_.value, b, sources_[e], group_);
      d_weight_[e] = dot<T, 0>(d_out, value, value_width);
      mean += double(weight_[e]) * double(d_weight_[e]);
    }
    const T* d_lse = static_cast<const T*>(wanted.d_lse);
    const T less =
        T(mean) - (d_lse ? d_lse[(b * call_.targets + target_) * call_.heads + h] : T(0));
    for (size_t e = 0; e < sources_.size(); ++e) {
      if (!kept_[e]) continue;
      T found = weight_[e] * (d_weight_[e] - less);
      if (d_table) d_table[hops_[e]] += double(found);
      if (cap > 0) {
        const T bounded = std::tanh(scale * affinity_[e] / cap);
        found *= 1 - bounded * bounded;
      }
      d_scale += double(found) * double(affinity_[e]);
      const T pull = scale * found;
      const T* key = at<const T>(call_.key, b, sources_[e], group_);
      T* d_key = at<T>(wanted.d_key, b, sources_[e], group_);
      if (RBF) {
        add_difference<T, 0>(d_query, pull, key, query, width);
        add_difference<T, 0>(d_key, pull, query, key, width);
      } else {
        add<T, 0>(d_query, pull, key, width);
        add<T, 0>(d_key, pull, query, width);
      }
      add<T, 0>(at<T>(wanted.d_value, b, sources_[e], group_), weight_[e], d_out, value_width);
    }
  }

 private:
  // Fills the vectors with the row's edges; returns its log-sum.
  T weigh(int64_t b, const Sequence& s, int64_t i, int64_t h) {
    constexpr T NONE = -std::numeric_limits<T>::infinity();
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
    const T scale = static_cast<const T*>(call_.scale)[h], cap = T(call_.softcap);
    const T* table = static_cast<const T*>(call_.table);
    const T* query = at<const T>(call_.query, b, target_, h);
    for (size_t e = 0; e < count; ++e) {
      const T* key = at<const T>(call_.key, b, sources_[e], group_);
      affinity_[e] = RBF ? squared_distance<T, 0>(query, key, call_.width) / -2
                         : dot<T, 0>(query, key, call_.width);
      weight_[e] = scale * affinity_[e];
      if (cap > 0) weight_[e] = cap * std::tanh(weight_[e] / cap);
      if (table) weight_[e] += table[(call_.origin + hops_[e]) * call_.heads + h];
    }
    if (call_.top_k > 0 && call_.top_k < static_cast<int64_t>(count)) keep_largest();
    T highest = NONE;
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
      if (kept_[e]) whole += double(weight_[e] = std::exp(weight_[e] - highest));
    }
    for (size_t e = 0; e < count; ++e) weight_[e] *= T(1) / T(whole);
    return highest + std::log(T(whole));
  }

  void keep_largest() {
    constexpr T NONE = -std::numeric_limits<T>::infinity();
    order_.resize(weight_.size());
    for (size_t e = 0; e < weight_.size(); ++e) order_[e] = ordered(weight_[e]);
    const auto begin = order_.begin(), kth = begin + call_.top_k - 1;
    std::nth_element(begin, kth, order_.end(), std::greater<Ordered<T>>());
    const Ordered<T> threshold = *kth;
    int64_t ties =
        call_.top_k - std::count_if(begin, kth + 1, [=](auto x) { return x > threshold; });
    for (size_t e = 0; e < weight_.size(); ++e) {
      const Ordered<T> own = ordered(weight_[e]);
      const bool tied = own == threshold && ties > 0;
      ties -= tied;
      kept_[e] = (own > threshold || tied) && weight_[e] != NONE;
    }
  }

  const BandsCall& call_;
  int64_t group_ = 0, target_ = 0;
  std::vector<int64_t> sources_, hops_;
  std::vector<T> affinity_, weight_, d_weight_;
  std::vector<Ordered<T>> order_;
  std::vector<uint8_t> kept_;
};

}  // namespace graphattn
