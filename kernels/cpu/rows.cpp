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
#include <stdexcept>
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

// A list of numbers of tokens or edges, int32_t or int64_t.
class List {
 public:
  List(const void* list, bool is_narrow) : list_(list), is_narrow_(is_narrow) {}

  int64_t operator[](int64_t n) const {
    return is_narrow_ ? static_cast<const int32_t*>(list_)[n] : static_cast<const int64_t*>(list_)[n];
  }
  explicit operator bool() const { return list_; }

  // From number n on, as loops over tokens read them: null if the list has to be copied for that.
  const int32_t* from(int64_t n) const {
    return is_narrow_ ? static_cast<const int32_t*>(list_) + n : nullptr;
  }

 private:
  const void* list_;
  bool is_narrow_;
};

// The edges of one target that count, and what is computed of them: [heads, edges].
template <class T>
struct Row {
  const int32_t* source = nullptr;  // [size]: the call's own list, or `sources`
  bool is_whole = true;             // whether it is; `edges` is not filled then
  std::vector<int64_t> edges;
  std::vector<int32_t> sources;
  std::vector<T> affinity, weight, averaged, d_weight, block;
  std::vector<Ordered<T>> order;      // of the logits of one head
  std::vector<uint8_t> kept, silent;  // edges of one head; heads whose results nobody asks for
  int64_t first = 0, size = 0, stride = 0;  // stride: size, rounded up to whole vectors

  int64_t edge(int64_t e) const { return is_whole ? first + e : edges[e]; }

  void reserve(int64_t heads) {
    constexpr int64_t L = Vec<T>::L;
    stride = (size + L - 1) / L * L;
    const size_t needed = static_cast<size_t>(heads * stride);
    for (auto* numbers : {&affinity, &weight, &d_weight}) {
      if (numbers->size() < needed) numbers->resize(needed);
    }
  }
};

template <class T>
class Rows {
 public:
  explicit Rows(const RowsCall& call)
      : call_(call), loops_(token_loops<T>(call.width, call.value_width, call.is_rbf)),
        rowptr_(list(call.rowptr)), source_(list(call.source)), bias_row_(list(call.bias_row)),
        scale_(static_cast<const T*>(call.scale)), bias_(static_cast<const T*>(call.bias)),
        repeats_(call.heads / call.kv_heads) {}

  // `next` is the target after i, whose tokens are fetched meanwhile; -1: there is none.
  void forward(int64_t b, int64_t i, int64_t next, Row<T>& row) const {
    T* lse = static_cast<T*>(call_.lse) + (b * call_.targets + i) * call_.table_heads;
    look(b, i, row);
    weigh(b, i, next, row, lse, nullptr);
    const T* weight = averaged(b, i, row);
    const int64_t width = call_.value_width;
    if (row.size == 0) return clear(call_.out, b, i, call_.heads, width);
    TokenLoop<T> loop = of_target(call_.query, call_.value, width, b, i, row);
    for_blocks(row, next, loop, [&](int64_t first) {
      const T* own = weight + first;
      loops_.sums(loop, own, own, T(DROPPED), heads<T>(call_.out, b, i), block(first, width, row));
    });
  }

  // Gradients of a query, of scales (added), and the two numbers of each of its edges and heads.
  void backward_of_target(const RowsGradients& wanted, int64_t b, int64_t i, int64_t next,
                          Row<T>& row, T* pairs, double* d_scale) const {
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
    TokenLoop<T> loop = of_target(call_.query, call_.key, width, b, i, row);
    loop.silent = row.silent.data();
    for_blocks(row, -1, loop, [&](int64_t first) {
      loop.next_count = 0;
      loops_.pulls(loop, row.d_weight.data() + first, row.weight.data() + first, T(NOT_KEPT),
                   heads<T>(wanted.d_query, b, i), block(first, width, row));
    });
  }

  // Gradients of a key and a value, from the two numbers of all edges.
  void backward_of_source(const RowsGradients& wanted, int64_t b, int64_t j, int64_t next,
                          Row<T>& row, const T* pairs) const {
    const int64_t H = call_.heads, width = call_.width, value_width = call_.value_width;
    const List colptr = list(wanted.colptr), targets = list(wanted.target);
    const List edges = list(wanted.edge);
    const int64_t begin = colptr[j], end = colptr[j + 1];
    if (begin == end) {
      clear(wanted.d_key, b, j, call_.kv_heads, width);
      return clear(wanted.d_value, b, j, call_.kv_heads, value_width);
    }
    row.size = BLOCK;
    row.reserve(H);
    TokenLoop<T> of_queries = of_source(call_.key, call_.query, width, b, j);
    TokenLoop<T> of_d_out = of_source(wanted.d_value, wanted.d_out, value_width, b, j);
    T *const weight = row.weight.data(), *const pull = row.d_weight.data();
    for (int64_t first = begin; first < end; first += BLOCK) {
      const int64_t count = std::min(BLOCK, end - first);
      const bool more = first + count < end;
      const int64_t after = more ? first + count : next < 0 ? 0 : colptr[next];
      const int64_t last = more ? end : next < 0 ? 0 : colptr[next + 1];
      const int64_t upcoming = std::min(last - after, BLOCK);
      for (int64_t e = 0; e < upcoming; ++e) {
        prefetch(pairs + edges[after + e] * H * 2, H * 2 * static_cast<int64_t>(sizeof(T)));
      }
      const T* pair[BLOCK];
      for (int64_t e = 0; e < count; ++e) pair[e] = pairs + edges[first + e] * H * 2;
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t e = 0; e < count; ++e) {
          weight[h * BLOCK + e] = pair[e][2 * h], pull[h * BLOCK + e] = pair[e][2 * h + 1];
        }
      }
      for (TokenLoop<T>* loop : {&of_queries, &of_d_out}) {
        loop->token = tokens(targets, first, count, row);
        loop->count = count;
        loop->next = targets.from(after);
        loop->next_count = loop->next ? upcoming : 0;
      }
      loops_.pulls(of_queries, pull, weight, T(NOT_KEPT), shared<T>(wanted.d_key, b, j),
                   block(first - begin, width, row));
      loops_.sums(of_d_out, weight, weight, T(DROPPED), shared<T>(wanted.d_value, b, j),
                  block(first - begin, value_width, row));
    }
  }

 private:
  List list(const void* numbers) const { return {numbers, call_.is_narrow != 0}; }

  // The query heads of a token.
  template <class U>
  static Heads<U> heads(const TokenView& view, int64_t b, int64_t token) {
    return {at<U>(view, b, token, 0), view.head, 0};
  }

  // The key heads of a token.
  template <class U>
  static Heads<U> shared(const TokenView& view, int64_t b, int64_t token) {
    return {at<U>(view, b, token, 0), 0, view.head};
  }

  // What a target and its sources have; `for_blocks` says which sources.
  TokenLoop<T> of_target(const TokenView& own, const TokenView& sources, int64_t width, int64_t b,
                         int64_t i, const Row<T>& row) const {
    return {call_.kv_heads, repeats_, width, sources.token, row.stride, nullptr,
            heads<const T>(own, b, i), shared<const T>(sources, b, 0), nullptr, nullptr, 0, 0};
  }

  // What a source and its targets have.
  TokenLoop<T> of_source(const TokenView& own, const TokenView& targets, int64_t width, int64_t b,
                         int64_t j) const {
    return {call_.kv_heads, repeats_, width, targets.token, BLOCK, nullptr,
            shared<const T>(own, b, j), heads<const T>(targets, b, 0), nullptr, nullptr, 0, 0};
  }

  // f(first) for every block of edges, whose tokens, and those after them, are in the loop then:
  // the row's own next ones, or those of the target `next`.
  template <class F>
  GRAPHATTN_INLINE void for_blocks(const Row<T>& row, int64_t next, TokenLoop<T>& loop,
                                   const F& f) const {
    for (int64_t first = 0; first < row.size; first += BLOCK) {
      loop.token = row.source + first;
      loop.count = std::min(BLOCK, row.size - first);
      if (first + BLOCK < row.size) {
        loop.next = loop.token + BLOCK;
        loop.next_count = std::min(BLOCK, row.size - first - BLOCK);
      } else {
        loop.next = next < 0 ? nullptr : source_.from(rowptr_[next]);
        loop.next_count = loop.next ? std::min(BLOCK, rowptr_[next + 1] - rowptr_[next]) : 0;
      }
      f(first);
    }
  }

  // Where a block of edges is summed up: the first one where the sum belongs.
  static T* block(int64_t first, int64_t width, Row<T>& row) {
    if (first == 0) return nullptr;
    row.block.resize(static_cast<size_t>(width));
    return row.block.data();
  }

  // Some of a list, where it lies or copied.
  static const int32_t* tokens(const List& list, int64_t first, int64_t count, Row<T>& row) {
    if (const int32_t* own = list.from(first)) return own;
    row.sources.resize(std::max(row.sources.size(), static_cast<size_t>(count)));
    for (int64_t e = 0; e < count; ++e) row.sources[e] = static_cast<int32_t>(list[first + e]);
    return row.sources.data();
  }

  static void clear(const TokenView& view, int64_t b, int64_t token, int64_t heads, int64_t width) {
    for (int64_t h = 0; h < heads; ++h) std::fill_n(at<T>(view, b, token, h), width, T(0));
  }

  // The edges between valid tokens.
  void look(int64_t b, int64_t i, Row<T>& row) const {
    row.first = rowptr_[i];
    row.size = rowptr_[i + 1] - row.first;
    const uint8_t *targets = call_.valid_targets, *valid = call_.valid_sources;
    if (targets && !targets[b * call_.targets + i]) row.size = 0;
    row.source = tokens(source_, row.first, row.size, row);
    row.is_whole = !valid;
    if (valid) {
      valid += b * call_.sources;
      if (static_cast<int64_t>(row.edges.size()) < row.size) {
        row.edges.resize(static_cast<size_t>(row.size));
        row.sources.resize(static_cast<size_t>(row.size));
      }
      int64_t kept = 0;
      for (int64_t e = 0; e < row.size; ++e) {
        const int32_t source = row.source[e];
        if (!valid[source]) continue;
        row.edges[kept] = row.first + e;
        row.sources[kept++] = source;
      }
      row.size = kept;
      row.source = row.sources.data();
    }
    row.reserve(call_.heads);
  }

  // Weights before dropout, and the logarithms of their sums. `given`: log-sums of the heads that
  // take the place of those of the row, which then keeps all its edges; or null.
  void weigh(int64_t b, int64_t i, int64_t next, Row<T>& row, T* lse, const T* given) const {
    TokenLoop<T> loop = of_target(call_.query, call_.key, call_.width, b, i, row);
    for_blocks(row, next, loop, [&](int64_t first) {
      loops_.affinities(loop, row.affinity.data() + first);
    });
    for (int64_t h = 0; h < call_.heads; ++h) {
      const T found = softmax(b, h, row, given ? given + h : nullptr);
      if (lse) lse[h] = found;
    }
  }

  // Gradients of the weights that values are averaged with, before dropout.
  void gradients_of_weights(const RowsGradients& wanted, int64_t b, int64_t i, int64_t next,
                            const T* weight, Row<T>& row) const {
    const bool some = call_.top_k > 0 && call_.top_k < row.size;
    const T more = call_.drop_rows ? T(1 / (1 - call_.dropout)) : T(1);
    TokenLoop<T> loop = of_target(wanted.d_out, call_.value, call_.value_width, b, i, row);
    loop.silent = row.silent.data();
    for_blocks(row, next, loop, [&](int64_t first) {
      if (!some) loops_.products(loop, row.d_weight.data() + first);
      if (!some && !call_.drop_rows) return;
      for (int64_t h = 0; h < call_.heads; ++h) {
        if (row.silent[h]) continue;
        const T* own = weight + h * row.stride + first;
        T* found = row.d_weight.data() + h * row.stride + first;
        if (some) products_of_kept(loop, h, own, found);
        for (int64_t e = 0; e < loop.count; ++e) found[e] = own[e] < 0 ? T(0) : more * found[e];
      }
    });
  }

  // The products of one head with the tokens that have a weight.
  void products_of_kept(const TokenLoop<T>& all, int64_t h, const T* weight, T* found) const {
    int32_t kept[BLOCK];
    T product[BLOCK];
    TokenLoop<T> loop = all;
    loop.own.first = all.own.at(h, h / repeats_);
    loop.tokens.first = all.tokens.at(h, h / repeats_);
    loop.key_heads = loop.repeats = 1, loop.silent = nullptr;
    loop.token = kept, loop.count = 0;
    for (int64_t e = 0; e < all.count; ++e) {
      kept[loop.count] = all.token[e];
      loop.count += !(weight[e] < 0);
    }
    loops_.products(loop, product);
    const T* next = product;
    for (int64_t e = 0; e < all.count; ++e) {
      if (!(weight[e] < 0)) found[e] = *next++;
    }
  }

  T capped(T logit) const {
    const T cap = T(call_.softcap);
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }

  // Weights of one head in the place of its affinities' logits; returns their log-sum.
  T softmax(int64_t b, int64_t h, Row<T>& row, const T* given) const {
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
      for (int64_t e = 0; e < row.size; ++e) {
        const int64_t edge = row.edge(e);
        weight[e] += bias[(bias_row_ ? bias_row_[edge] : edge) * call_.table_heads];
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
  void keep_largest(Row<T>& row, T* logit) const {
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
  const T* averaged(int64_t b, int64_t i, Row<T>& row) const {
    if (!call_.drop_rows) return row.weight.data();
    row.averaged.resize(row.weight.size());
    const T more = T(1 / (1 - call_.dropout));
    for (int64_t h = 0; h < call_.heads; ++h) {
      const int64_t hash = call_.drop_rows[(b * call_.targets + i) * call_.table_heads + h];
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
  void note_silent_heads(const RowsGradients& wanted, int64_t b, int64_t i, Row<T>& row) const {
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
    return static_cast<const T*>(numbers) + (b * call_.targets + i) * call_.table_heads + h;
  }

  // From gradients of one head's weights to those of its products, which take their place, and to
  // the two numbers per edge; returns the gradient of the scale.
  double gradients_of_logits(const RowsGradients& wanted, int64_t b, int64_t i, int64_t h,
                             Row<T>& row, T* pairs) const {
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
      if (d_bias) d_bias[row.edge(e) * call_.table_heads] += found;
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
  const TokenLoops<T> loops_;
  const List rowptr_, source_, bias_row_;
  const T* scale_;
  const T* bias_;
  const int64_t repeats_;  // query heads of a key head
};

// Rows in the order of visits, in tasks of about the same number of edges; how they are cut depends
// on the graph alone.
class Tasks {
 public:
  // `before`: edges before every visit; `order`: which row it is of, or null: as they lie.
  Tasks(const void* before, const void* order, bool is_narrow, int64_t rows)
      : before_(before, is_narrow), order_(order, is_narrow), rows_(rows),
        count_(std::clamp<int64_t>(rows / 4, 1, std::clamp<int64_t>(rows / VISITS, 64, TASKS))) {}

  int64_t count() const { return count_; }

  // f(row, the row after it or -1) for every row of a task.
  template <class F>
  void visit(int64_t task, const F& f) const {
    const int64_t end = first(task + 1);
    for (int64_t t = first(task); t < end; ++t) f(row(t), t + 1 < rows_ ? row(t + 1) : -1);
  }

 private:
  int64_t row(int64_t t) const { return order_ ? order_[t] : t; }

  int64_t first(int64_t task) const {
    if (task == 0) return 0;
    if (task == count_) return rows_;
    const int64_t edge = static_cast<int64_t>(double(before_[rows_]) * task / count_);
    // Rows without edges cost something, too.
    int64_t low = 0, high = rows_;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      before_[middle] < edge ? low = middle + 1 : high = middle;
    }
    return low;
  }

  const List before_, order_;
  int64_t rows_, count_;
};

int64_t edges_of(const RowsCall& call) {
  return List(call.rowptr, call.is_narrow)[call.targets];
}

int threads_for(const RowsCall& call, int64_t edges) {
  return threads_worth(double(edges) * double(call.batch) * double(call.heads * (call.width + call.value_width)),
                       static_cast<int>(call.threads));
}

template <class T>
void forward(const RowsCall& call) {
  const Rows<T> rows(call);
  const Tasks tasks(call.order ? call.before : call.rowptr, call.order, call.is_narrow,
                    call.targets);
  const int threads = threads_for(call, edges_of(call));
  std::vector<Row<T>> own(static_cast<size_t>(std::max(threads, 1)));
  parallel_tasks(tasks.count(), threads, [&](int64_t task, int worker) {
    for (int64_t b = 0; b < call.batch; ++b) {
      tasks.visit(task, [&](int64_t i, int64_t next) { rows.forward(b, i, next, own[worker]); });
    }
  });
}

template <class T>
void backward(const RowsCall& call, const RowsGradients& wanted) {
  const Rows<T> rows(call);
  const bool ordered = call.order;
  const Tasks of_targets(ordered ? call.before : call.rowptr, call.order, call.is_narrow,
                         call.targets);
  const Tasks of_sources(ordered ? wanted.before : wanted.colptr, wanted.order, call.is_narrow,
                         call.sources);
  const int threads = threads_for(call, edges_of(call));
  std::vector<Row<T>> own(static_cast<size_t>(std::max(threads, 1)));
  const int64_t H = call.heads, numbers = edges_of(call) * H * 2;
  const int64_t entries = std::clamp<int64_t>(PAIRS / std::max<int64_t>(numbers, 1), 1,
                                              std::max<int64_t>(call.batch, 1));
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

// A pointer to numbers of T, or null, without the first of them.
template <class T, class P>
void skip(P*& numbers, int64_t count) {
  if (numbers) numbers = reinterpret_cast<P*>(reinterpret_cast<uintptr_t>(numbers) + count * sizeof(T));
}

template <class T>
void skip_heads(TokenView& view, int64_t count) {
  skip<T>(view.data, count * view.head);
}

// The same call of key heads first .. first + count - 1: tensors and tables begin with these.
template <class T>
RowsCall heads_of(const RowsCall& call, int64_t first, int64_t count) {
  RowsCall some = call;
  const int64_t repeats = call.heads / call.kv_heads;
  some.kv_heads = count, some.heads = count * repeats;
  skip_heads<T>(some.query, first * repeats), skip_heads<T>(some.out, first * repeats);
  skip_heads<T>(some.key, first), skip_heads<T>(some.value, first);
  skip<T>(some.scale, first * repeats), skip<T>(some.bias, first * repeats);
  skip<T>(some.lse, first * repeats), skip<int64_t>(some.drop_rows, first * repeats);
  return some;
}

template <class T>
RowsGradients heads_of(const RowsGradients& wanted, int64_t repeats, int64_t first) {
  RowsGradients some = wanted;
  skip_heads<T>(some.d_out, first * repeats), skip_heads<T>(some.d_query, first * repeats);
  skip_heads<T>(some.d_key, first), skip_heads<T>(some.d_value, first);
  skip<T>(some.d_lse, first * repeats), skip<double>(some.d_scale, first * repeats);
  skip<T>(some.d_bias, first * repeats);
  skip<T>(some.lse, first * repeats), skip<T>(some.delta, first * repeats);
  return some;
}

// Rows that read tokens all over memory find them in the cache if these are few: then some heads
// go over all rows before the next ones do.
template <class T>
void run(const RowsCall& call, const RowsGradients* wanted) {
  const int64_t H = call.heads, G = call.kv_heads, of_query = call.batch * call.targets * H;
  const int64_t of_key = call.batch * call.sources * G, size = sizeof(T);
  if (wanted) {
    huge(wanted->d_query.data, of_query * call.width * size);
    huge(wanted->d_key.data, of_key * call.width * size);
    huge(wanted->d_value.data, of_key * call.value_width * size);
  } else {
    huge(call.out.data, of_query * call.value_width * size);
  }
  const int64_t at_once = call.at_once > 0 ? call.at_once : G;
  for (int64_t first = 0; first < G; first += at_once) {
    const RowsCall some = heads_of<T>(call, first, std::min(at_once, G - first));
    wanted ? backward<T>(some, heads_of<T>(*wanted, H / G, first)) : forward<T>(some);
  }
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_attention_rows(const graphattn::RowsCall* call,
                                               const graphattn::RowsGradients* wanted,
                                               int32_t is_double) {
  return graphattn::guarded([&] {
    if (std::max(call->targets, call->sources) > graphattn::MOST_TOKENS) throw std::length_error("tokens");
    is_double ? graphattn::run<double>(*call, wanted) : graphattn::run<float>(*call, wanted);
  });
}
