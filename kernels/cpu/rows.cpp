// Attention over lists of edges: one row of edges per target, any graph, forward and backward.
//
// Every row is computed by itself, edge by edge, and from q - k where distances are meant: so what
// a row does not see cannot change a bit of it, equal sources have equal logits, and results do not
// depend on the number of threads. The backward goes over the rows of targets, leaves a weight and
// its gradient per edge and head, and then over the rows of sources, which add up what is theirs in
// the order of their edges: there are no atomic additions.

#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "feature_sums.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"
#include "tokens.h"

namespace graphattn {
namespace {

constexpr int64_t BLOCK = 64;          // edges that are summed up before they join a longer sum
constexpr int64_t EXPONENTIALS = 256;  // so many before they join a sum of float64
constexpr int64_t TASKS = 512;         // at most, of about the same number of edges
constexpr int64_t VISITS = 128;        // rows of a task: those that share sources stay together
constexpr int64_t PAIRS = 1 << 23;     // weights and gradients that the backward keeps at a time

// What stands in the place of a weight.
constexpr int NOT_KEPT = -2;  // the edge does not count: it is no edge, or not among the top k
constexpr int DROPPED = -1;   // it counts, but dropout takes its value away

// The edges of one target that count, and what is computed of them: [heads, edges].
template <class T, class I>
struct Row {
  const I* source = nullptr;  // [size]: the call's own list, or `sources`
  bool is_whole = true;       // whether all edges count; `edges` is not filled then
  std::vector<I> edges, sources;
  std::vector<T> affinity, weight, averaged, d_weight, block;
  std::vector<Ordered<T>> order;      // of the logits of one head
  std::vector<uint8_t> kept, silent;  // edges of one head; heads whose results nobody asks for
  int64_t first = 0, size = 0, stride = 0;  // stride: size, rounded up to whole vectors

  int64_t edge(int64_t e) const { return is_whole ? first + e : int64_t{edges[e]}; }

  void reserve(int64_t heads) {
    constexpr int64_t L = Vec<T>::L;
    stride = (size + L - 1) / L * L;
    const size_t needed = static_cast<size_t>(heads * stride);
    for (auto* numbers : {&affinity, &weight, &d_weight}) {
      if (numbers->size() < needed) numbers->resize(needed);
    }
  }
};

// I: what lists of edges are made of.
template <class T, class I, int D, bool RBF>
class Rows {
 public:
  explicit Rows(const RowsCall& call)
      : call_(call), rowptr_(static_cast<const I*>(call.rowptr)),
        source_(static_cast<const I*>(call.source)), scale_(static_cast<const T*>(call.scale)),
        bias_(static_cast<const T*>(call.bias)), repeats_(call.heads / call.kv_heads) {}

  // `next` is the target after i, whose tokens are fetched meanwhile; -1: there is none.
  void forward(int64_t b, int64_t i, int64_t next, Row<T, I>& row) const {
    T* lse = static_cast<T*>(call_.lse) + (b * call_.targets + i) * call_.heads;
    look(b, i, row);
    weigh(b, i, next, row, lse, nullptr);
    const T* weight = averaged(b, i, row);
    const int64_t width = call_.value_width;
    if (row.size == 0) return clear(call_.out, b, i, call_.heads, width);
    for_blocks(row.size, [&](int64_t first, int64_t count) {
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        const T* own = weight + h * row.stride + first;
        sum_up<false>(at<T>(call_.out, b, i, h), row, first, own, own,
                      T(DROPPED), tokens(call_.value, b, g, row.source + first, count), nullptr,
                      width, coming(call_.value, b, g, row, first + count, next));
      });
    });
  }

  // Gradients of a query, of scales (added), and the two numbers of each of its edges and heads.
  void backward_of_target(const RowsGradients& wanted, int64_t b, int64_t i, int64_t next,
                          Row<T, I>& row, T* pairs, double* d_scale) const {
    const int64_t H = call_.heads, width = call_.width;
    look(b, i, row);
    if (row.size < rowptr_[i + 1] - row.first || row.size == 0) {
      for (int64_t e = row.first * H; e < rowptr_[i + 1] * H; ++e) {
        pairs[e * 2] = T(NOT_KEPT);
        pairs[e * 2 + 1] = T(0);
      }
    }
    if (row.size == 0) return clear(wanted.d_query, b, i, H, width);
    weigh(b, i, next, row, nullptr, number(wanted.lse, b, i, 0));
    const T* weight = averaged(b, i, row);
    note_silent_heads(wanted, b, i, row);
    gradients_of_weights(wanted, b, i, next, weight, row);
    for (int64_t h = 0; h < H; ++h) {
      if (row.silent[h]) {
        for (int64_t e = 0; e < row.size; ++e) {
          T* pair = pairs + (row.edge(e) * H + h) * 2;
          pair[0] = T(NOT_KEPT), pair[1] = T(0);
        }
        std::fill_n(at<T>(wanted.d_query, b, i, h), width, T(0));
      } else {
        d_scale[h] += gradients_of_logits(wanted, b, i, h, row, pairs);
      }
    }
    const Tokens<T, I> nothing{nullptr, 0, nullptr, 0};
    for_blocks(row.size, [&](int64_t first, int64_t count) {
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        if (row.silent[h]) return;
        const int64_t place = h * row.stride + first;
        const T* query = at<T>(call_.query, b, i, h);
        sum_up<RBF>(at<T>(wanted.d_query, b, i, h), row, first,
                    row.d_weight.data() + place, row.weight.data() + place, T(NOT_KEPT),
                    tokens(call_.key, b, g, row.source + first, count), query, width, nothing);
      });
    });
  }

  // Gradients of a key and a value, from the two numbers of all edges.
  void backward_of_source(const RowsGradients& wanted, int64_t b, int64_t j, int64_t next,
                          Row<T, I>& row, const T* pairs) const {
    const int64_t H = call_.heads, width = call_.width, value_width = call_.value_width;
    const I* const colptr = static_cast<const I*>(wanted.colptr);
    const I* const targets = static_cast<const I*>(wanted.target);
    const I* const edges = static_cast<const I*>(wanted.edge);
    const int64_t begin = colptr[j], size = colptr[j + 1] - begin;
    if (size == 0) {
      clear(wanted.d_key, b, j, call_.kv_heads, width);
      return clear(wanted.d_value, b, j, call_.kv_heads, value_width);
    }
    T weight[BLOCK], pull[BLOCK];
    for_blocks(size, [&](int64_t first, int64_t count) {
      const I *target = targets + begin + first, *edge = edges + begin + first;
      const bool more = first + count < size;
      const int64_t after = more ? begin + first + count : next < 0 ? 0 : int64_t{colptr[next]};
      const int64_t end = more ? begin + size : next < 0 ? 0 : int64_t{colptr[next + 1]};
      const int64_t upcoming = std::min(end - after, BLOCK);
      for (int64_t e = 0; e < upcoming; ++e) {
        prefetch(pairs + edges[after + e] * H * 2, H * 2 * static_cast<int64_t>(sizeof(T)));
      }
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        for (int64_t e = 0; e < count; ++e) {
          const T* pair = pairs + (edge[e] * H + h) * 2;
          weight[e] = pair[0], pull[e] = pair[1];
        }
        const bool again = h > g * repeats_;  // a query head after the first of its key head
        sum_up<RBF>(at<T>(wanted.d_key, b, j, g), row, first, pull, weight, T(NOT_KEPT),
                    tokens(call_.query, b, h, target, count),
                    at<T>(call_.key, b, j, g), width,
                    tokens(call_.query, b, h, targets + after, upcoming), again);
        sum_up<false>(at<T>(wanted.d_value, b, j, g), row, first, weight, weight, T(DROPPED), tokens(wanted.d_out, b, h, target, count),
                      nullptr, value_width,
                      tokens(wanted.d_out, b, h, targets + after, upcoming), again);
      });
    });
  }

 private:
  // f(h, g) for every query head h and its key head g.
  template <class F>
  GRAPHATTN_INLINE void for_heads(const F& f) const {
    for (int64_t g = 0, h = 0; g < call_.kv_heads; ++g) {
      for (int64_t r = 0; r < repeats_; ++r, ++h) f(h, g);
    }
  }

  // f(first, count) for every block of edges.
  template <class F>
  GRAPHATTN_INLINE void for_blocks(int64_t size, const F& f) const {
    for (int64_t first = 0; first < size; first += BLOCK) f(first, std::min(BLOCK, size - first));
  }

  static GRAPHATTN_INLINE Tokens<T, I> tokens(const TokenView& view, int64_t b, int64_t head,
                                           const I* token, int64_t count) {
    return {at<const T>(view, b, 0, head), view.token, token, count};
  }

  // The tokens that will be read after the first `done` of a row: its own next ones, or those of
  // the target `next`.
  GRAPHATTN_INLINE Tokens<T, I> coming(const TokenView& view, int64_t b, int64_t g, const Row<T, I>& row,
                                    int64_t done, int64_t next) const {
    if (done < row.size) {
      return tokens(view, b, g, row.source + done, std::min(BLOCK, row.size - done));
    }
    if (next < 0) return tokens(view, b, g, nullptr, 0);
    const int64_t first = rowptr_[next];
    return tokens(view, b, g, source_ + first,
                  std::min(BLOCK, rowptr_[next + 1] - first));
  }

  static void clear(const TokenView& view, int64_t b, int64_t token, int64_t heads, int64_t width) {
    for (int64_t h = 0; h < heads; ++h) std::fill_n(at<T>(view, b, token, h), width, T(0));
  }

  // One block's part of a sum over edges, see `add_tokens`. The first block is summed up where the
  // sum belongs; `again`: there is something already.
  template <bool DIFFERENCE>
  GRAPHATTN_INLINE void sum_up(T* into, Row<T, I>& row, int64_t first, const T* factor, const T* state,
                               T counts_above, const Tokens<T, I>& tokens, const T* less,
                               int64_t width, const Tokens<T, I>& next, bool again = false) const {
    if (first == 0) {
      return add_tokens<T, D, DIFFERENCE>(into, !again, factor, state, counts_above, tokens, less,
                                          width, next);
    }
    row.block.resize(static_cast<size_t>(width));
    add_tokens<T, D, DIFFERENCE>(row.block.data(), true, factor, state, counts_above, tokens, less,
                                 width, next);
    add<T, D>(into, T(1), row.block.data(), width);
  }

  // The edges between valid tokens.
  void look(int64_t b, int64_t i, Row<T, I>& row) const {
    row.first = rowptr_[i];
    row.size = rowptr_[i + 1] - row.first;
    row.source = source_ + row.first;
    const uint8_t *targets = call_.valid_targets, *valid = call_.valid_sources;
    if (targets && !targets[b * call_.targets + i]) row.size = 0;
    row.is_whole = !valid;
    if (valid) {
      valid += b * call_.sources;
      if (static_cast<int64_t>(row.edges.size()) < row.size) {
        row.edges.resize(static_cast<size_t>(row.size));
        row.sources.resize(static_cast<size_t>(row.size));
      }
      int64_t kept = 0;
      for (int64_t e = 0; e < row.size; ++e) {
        if (!valid[row.source[e]]) continue;
        row.edges[kept] = static_cast<I>(row.first + e);
        row.sources[kept++] = row.source[e];
      }
      row.size = kept;
      row.source = row.sources.data();
    }
    row.reserve(call_.heads);
  }

  // Weights before dropout, and the logarithms of their sums. `given`: log-sums of the heads that
  // take the place of those of the row, which then keeps all its edges; or null.
  void weigh(int64_t b, int64_t i, int64_t next, Row<T, I>& row, T* lse, const T* given) const {
    for_blocks(row.size, [&](int64_t first, int64_t count) {
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        products<T, D, RBF>(at<T>(call_.query, b, i, h),
                            tokens(call_.key, b, g, row.source + first, count), call_.width,
                            row.affinity.data() + h * row.stride + first,
                            coming(call_.key, b, g, row, first + count, next));
      });
    });
    for (int64_t h = 0; h < call_.heads; ++h) {
      const T found = softmax(b, h, row, given ? given + h : nullptr);
      if (lse) lse[h] = found;
    }
  }

  // Gradients of the weights that values are averaged with, before dropout.
  void gradients_of_weights(const RowsGradients& wanted, int64_t b, int64_t i, int64_t next,
                            const T* weight, Row<T, I>& row) const {
    const bool all = !call_.drop_rows && !(call_.top_k > 0 && call_.top_k < row.size);
    const T more = call_.drop_rows ? T(1 / (1 - call_.dropout)) : T(1);
    const int64_t width = call_.value_width;
    for_blocks(row.size, [&](int64_t first, int64_t count) {
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        if (row.silent[h]) return;
        const int64_t place = h * row.stride + first;
        const T* d_out = at<T>(wanted.d_out, b, i, h);
        T* found = row.d_weight.data() + place;
        const Tokens<T, I> values = tokens(call_.value, b, g, row.source + first, count);
        const Tokens<T, I> after = coming(call_.value, b, g, row, first + count, next);
        if (all) return products<T, D, false>(d_out, values, width, found, after);
        for (int64_t e = 0; e < std::max(count, after.count); ++e) {
          fetch<T, D>(after, e, width);
          if (e >= count) continue;
          found[e] = weight[place + e] < 0 ? T(0) : more * dot<T, D>(d_out, values[e], width);
        }
      });
    });
  }

  T capped(T logit) const {
    const T cap = T(call_.softcap);
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }

  // Weights of one head in the place of its affinities' logits; returns their log-sum.
  T softmax(int64_t b, int64_t h, Row<T, I>& row, const T* given) const {
    constexpr int64_t L = Vec<T>::L;
    constexpr T NONE = -std::numeric_limits<T>::infinity();
    const T* affinity = row.affinity.data() + h * row.stride;
    T* weight = row.weight.data() + h * row.stride;
    if (call_.softcap > 0) {
      for (int64_t e = 0; e < row.size; ++e) weight[e] = capped(scale_[h] * affinity[e]);
    } else {
      for (int64_t e = 0; e < row.size; ++e) weight[e] = scale_[h] * affinity[e];
    }
    if (bias_) {
      const T* bias = bias_ + b * call_.bias_batch + h;
      const I* table = static_cast<const I*>(call_.bias_row);
      for (int64_t e = 0; e < row.size; ++e) {
        const int64_t edge = row.edge(e);
        weight[e] += bias[(table ? int64_t{table[edge]} : edge) * call_.heads];
      }
    }
    for (int64_t e = row.size; e < row.stride; ++e) weight[e] = NONE;
    if (given) {
      if (*given == NONE) {
        std::fill_n(weight, row.stride, T(NOT_KEPT));
      } else {
        for (int64_t e = 0; e < row.stride; e += L) {
          store(weight + e, exp(load(weight + e) - broadcast(*given)));
        }
      }
      return *given;
    }
    const bool some = call_.top_k > 0 && call_.top_k < row.size;
    if (some) keep_largest(row, weight);
    vec<T> most = broadcast(NONE);
    for (int64_t e = 0; e < row.stride; e += L) most = maximum(most, load(weight + e));
    T highest = largest(most);
    if (highest == NONE) {  // or all are NaN
      bool empty = true;
      for (int64_t e = 0; e < row.size; ++e) empty = empty && weight[e] == NONE;
      if (empty) {
        std::fill_n(weight, row.stride, T(NOT_KEPT));
        return NONE;
      }
    }
    double whole = 0;
    for (int64_t first = 0; first < row.stride; first += EXPONENTIALS) {
      vec<T> part{};
      for (int64_t e = first; e < std::min(first + EXPONENTIALS, row.stride); e += L) {
        const vec<T> exponential = exp(load(weight + e) - broadcast(highest));
        store(weight + e, exponential);
        part += exponential;
      }
      whole += sum(part);
    }
    const vec<T> share = broadcast(T(1) / T(whole));
    for (int64_t e = 0; e < row.stride; e += L) store(weight + e, load(weight + e) * share);
    if (some) {
      for (int64_t e = 0; e < row.size; ++e) {
        if (!row.kept[e]) weight[e] = T(NOT_KEPT);
      }
    }
    return highest + std::log(T(whole));
  }

  // Marks the `top_k` largest logits, of equal ones the first, and puts -inf in all other places.
  void keep_largest(Row<T, I>& row, T* logit) const {
    constexpr T NONE = -std::numeric_limits<T>::infinity();
    const int64_t k = call_.top_k, size = row.size;
    if (static_cast<int64_t>(row.kept.size()) < size) {
      row.kept.resize(static_cast<size_t>(size));
      row.order.resize(static_cast<size_t>(size));
    }
    for (int64_t e = 0; e < size; ++e) row.order[e] = ordered(logit[e]);
    const auto begin = row.order.begin();
    std::nth_element(begin, begin + k - 1, begin + size, std::greater<Ordered<T>>());
    const Ordered<T> threshold = row.order[k - 1];
    int64_t ties = k - std::count_if(begin, begin + k, [=](auto x) { return x > threshold; });
    for (int64_t e = 0; e < size; ++e) {
      const Ordered<T> own = ordered(logit[e]);
      const bool tied = own == threshold && ties > 0;
      ties -= tied;
      row.kept[e] = (own > threshold || tied) && logit[e] != NONE;
      if (!row.kept[e]) logit[e] = NONE;
    }
  }

  // Weights after dropout: they are what values are averaged with.
  const T* averaged(int64_t b, int64_t i, Row<T, I>& row) const {
    if (!call_.drop_rows) return row.weight.data();
    row.averaged.resize(row.weight.size());
    const T more = T(1 / (1 - call_.dropout));
    for (int64_t h = 0; h < call_.heads; ++h) {
      const int64_t hash = call_.drop_rows[(b * call_.targets + i) * call_.heads + h];
      const uint32_t low = static_cast<uint32_t>(hash);
      const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(hash) >> 32);
      for (int64_t e = h * row.stride; e < h * row.stride + row.size; ++e) {
        const uint32_t column = call_.drop_columns[row.source[e - h * row.stride]];
        uint32_t x = (low ^ column) * 0x85EBCA6Bu;
        x = (x ^ (x >> 15)) * (high | 1u);
        const bool dropped = static_cast<int32_t>(x) < call_.drop_below;
        const T weight = row.weight[e];
        row.averaged[e] = weight < 0 ? weight : dropped ? T(DROPPED) : more * weight;
      }
    }
    return row.averaged.data();
  }

  // Heads whose results nobody asks for: whatever they saw, they give nothing.
  void note_silent_heads(const RowsGradients& wanted, int64_t b, int64_t i, Row<T, I>& row) const {
    row.silent.resize(static_cast<size_t>(call_.heads));
    for (int64_t h = 0; h < call_.heads; ++h) {
      const T* d_out = at<const T>(wanted.d_out, b, i, h);
      bool silent = d_lse(wanted, b, i, h) == 0;
      for (int64_t d = 0; silent && d < call_.value_width; ++d) silent = d_out[d] == 0;
      row.silent[h] = silent;
    }
  }

  T d_lse(const RowsGradients& wanted, int64_t b, int64_t i, int64_t h) const {
    const T* found = number(wanted.d_lse, b, i, h);
    return found ? *found : T(0);
  }

  // One of the numbers [batch, targets, heads]; null stays null.
  const T* number(const void* numbers, int64_t b, int64_t i, int64_t h) const {
    if (!numbers) return nullptr;
    return static_cast<const T*>(numbers) + (b * call_.targets + i) * call_.heads + h;
  }

  // From gradients of one head's weights to those of its products, which take their place, and to
  // the two numbers per edge; returns the gradient of the scale.
  double gradients_of_logits(const RowsGradients& wanted, int64_t b, int64_t i, int64_t h,
                             Row<T, I>& row, T* pairs) const {
    const T* weight = row.weight.data() + h * row.stride;
    const T* affinity = row.affinity.data() + h * row.stride;
    const T* read = (call_.drop_rows ? row.averaged : row.weight).data() + h * row.stride;
    T* d_weight = row.d_weight.data() + h * row.stride;
    double mean = 0, d_scale = 0;
    const T* delta = number(wanted.delta, b, i, h);
    for (int64_t e = 0; !delta && e < row.size; ++e) {
      if (weight[e] >= 0 || std::isnan(weight[e])) mean += double(weight[e]) * double(d_weight[e]);
    }
    const T less = delta ? *delta : T(mean) - d_lse(wanted, b, i, h);
    const T cap = T(call_.softcap);
    T* d_bias = static_cast<T*>(wanted.d_bias);
    if (d_bias) d_bias += b * wanted.d_bias_batch + h;
    for (int64_t e = 0; e < row.size; ++e) {
      T* pair = pairs + (row.edge(e) * call_.heads + h) * 2;
      if (weight[e] < 0) {
        pair[0] = T(NOT_KEPT), pair[1] = T(0);
        continue;
      }
      T found = weight[e] * (d_weight[e] - less);
      if (d_bias) d_bias[row.edge(e) * call_.heads] += found;
      if (cap > 0) {
        const T bounded = std::tanh(scale_[h] * affinity[e] / cap);
        found *= 1 - bounded * bounded;
      }
      d_scale += double(found) * double(affinity[e]);
      d_weight[e] = scale_[h] * found;
      pair[0] = read[e];
      pair[1] = d_weight[e];
    }
    return d_scale;
  }

  const RowsCall& call_;
  const I *rowptr_, *source_;
  const T* scale_;
  const T* bias_;
  const int64_t repeats_;  // query heads of a key head
};

// Rows in the order of visits, in tasks of about the same number of edges; how they are cut depends
// on the graph alone.
template <class I>
class Tasks {
 public:
  // `before`: edges before every visit; `order`: which row it is of, or null: as they lie.
  Tasks(const void* before, const void* order, int64_t rows)
      : before_(static_cast<const I*>(before)), order_(static_cast<const I*>(order)), rows_(rows),
        count_(std::clamp<int64_t>(rows / 4, 1, std::clamp<int64_t>(rows / VISITS, 64, TASKS))) {}

  int64_t count() const { return count_; }

  // f(row, the row after it or -1) for every row of a task.
  template <class F>
  void visit(int64_t task, const F& f) const {
    const int64_t end = first(task + 1);
    for (int64_t t = first(task); t < end; ++t) f(row(t), t + 1 < rows_ ? row(t + 1) : -1);
  }

 private:
  int64_t row(int64_t t) const { return order_ ? int64_t{order_[t]} : t; }

  int64_t first(int64_t task) const {
    if (task == 0) return 0;
    if (task == count_) return rows_;
    const int64_t edge = static_cast<int64_t>(double(before_[rows_]) * task / count_);
    // Rows without edges cost something, too.
    return std::lower_bound(before_, before_ + rows_, edge) - before_;
  }

  const I *before_, *order_;
  int64_t rows_, count_;
};

template <class I>
int64_t edges_of(const RowsCall& call) {
  return static_cast<const I*>(call.rowptr)[call.targets];
}

int threads_for(const RowsCall& call, int64_t edges) {
  return threads_worth(double(edges) * double(call.batch) * double(call.heads * (call.width + call.value_width)),
                       static_cast<int>(call.threads));
}

template <class T, class I, int D, bool RBF>
void forward(const RowsCall& call) {
  const Rows<T, I, D, RBF> rows(call);
  huge(call.out.data, call.batch * call.targets * call.heads * call.value_width * sizeof(T));
  const Tasks<I> tasks(call.order ? call.before : call.rowptr, call.order, call.targets);
  const int threads = threads_for(call, edges_of<I>(call));
  std::vector<Row<T, I>> own(static_cast<size_t>(std::max(threads, 1)));
  parallel_tasks(tasks.count(), threads, [&](int64_t task, int worker) {
    for (int64_t b = 0; b < call.batch; ++b) {
      tasks.visit(task, [&](int64_t i, int64_t next) { rows.forward(b, i, next, own[worker]); });
    }
  });
}

template <class T, class I, int D, bool RBF>
void backward(const RowsCall& call, const RowsGradients& wanted) {
  const Rows<T, I, D, RBF> rows(call);
  const bool ordered = call.order;
  const Tasks<I> of_targets(ordered ? call.before : call.rowptr, call.order, call.targets);
  const Tasks<I> of_sources(ordered ? wanted.before : wanted.colptr, wanted.order, call.sources);
  const int threads = threads_for(call, edges_of<I>(call));
  std::vector<Row<T, I>> own(static_cast<size_t>(std::max(threads, 1)));
  const int64_t H = call.heads, numbers = edges_of<I>(call) * H * 2;
  const int64_t entries = std::clamp<int64_t>(PAIRS / std::max<int64_t>(numbers, 1), 1,
                                              std::max<int64_t>(call.batch, 1));
  huge(wanted.d_query.data, call.batch * call.targets * H * call.width * sizeof(T));
  huge(wanted.d_key.data, call.batch * call.sources * call.kv_heads * call.width * sizeof(T));
  huge(wanted.d_value.data,
       call.batch * call.sources * call.kv_heads * call.value_width * sizeof(T));
  Buffer<T> pairs(numbers * entries);
  huge(pairs.data(), numbers * entries * sizeof(T));
  Buffer<double> d_scale(of_targets.count() * H);
  std::fill_n(d_scale.data(), of_targets.count() * H, 0.0);
  for (int64_t first = 0; first < call.batch; first += entries) {
    const int64_t last = std::min(first + entries, call.batch);
    parallel_tasks(of_targets.count(), threads, [&](int64_t task, int worker) {
      for (int64_t b = first; b < last; ++b) {
        of_targets.visit(task, [&](int64_t i, int64_t next) {
          rows.backward_of_target(wanted, b, i, next, own[worker],
                                  pairs.data() + (b - first) * numbers, d_scale.data() + task * H);
        });
      }
    });
    parallel_tasks(of_sources.count(), threads, [&](int64_t task, int worker) {
      for (int64_t b = first; b < last; ++b) {
        of_sources.visit(task, [&](int64_t j, int64_t next) {
          rows.backward_of_source(wanted, b, j, next, own[worker],
                                  pairs.data() + (b - first) * numbers);
        });
      }
    });
  }
  for (int64_t task = 0; task < of_targets.count(); ++task) {
    for (int64_t h = 0; h < H; ++h) wanted.d_scale[h] += d_scale.data()[task * H + h];
  }
}

template <class T, class I, int D>
void run(const RowsCall& call, const RowsGradients* wanted) {
  if (wanted) {
    call.is_rbf ? backward<T, I, D, true>(call, *wanted) : backward<T, I, D, false>(call, *wanted);
  } else {
    call.is_rbf ? forward<T, I, D, true>(call) : forward<T, I, D, false>(call);
  }
}

template <class T>
void run(const RowsCall& call, const RowsGradients* wanted) {
  if (!call.is_narrow) return run<T, int64_t, 0>(call, wanted);  // graphs of 2^31 edges and more
  // Widths that are known take a quarter less time; of float64 nobody waits for it.
  if constexpr (std::is_same_v<T, float>) {
    switch (call.width == call.value_width ? call.width : 0) {
      case 16: return run<T, int32_t, 16>(call, wanted);
      case 32: return run<T, int32_t, 32>(call, wanted);
      case 64: return run<T, int32_t, 64>(call, wanted);
      case 128: return run<T, int32_t, 128>(call, wanted);
    }
  }
  run<T, int32_t, 0>(call, wanted);
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_attention_rows(const graphattn::RowsCall* call,
                                               const graphattn::RowsGradients* wanted,
                                               int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::run<double>(*call, wanted) : graphattn::run<float>(*call, wanted);
  });
}
