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

#include "features.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t AHEAD = 2;           // edges: whose tokens are fetched into the cache meanwhile
constexpr int64_t BLOCK = 256;         // edges that are summed up before they join a longer sum
constexpr int64_t TASKS = 512;         // at most, of about the same number of edges
constexpr int64_t PAIRS = 1 << 23;     // weights and gradients that the backward keeps at a time

// What stands in the place of a weight.
constexpr int NOT_KEPT = -2;  // the edge does not count: it is no edge, or not among the top k
constexpr int DROPPED = -1;   // it counts, but dropout takes its value away

// The edges of one target that count, and what is computed of them: [heads, edges].
template <class T>
struct Row {
  std::vector<int64_t> edges, sources;
  std::vector<T> affinity, weight, averaged, d_weight, block;
  std::vector<Ordered<T>> order;      // of the logits of one head
  std::vector<uint8_t> kept, silent;  // edges of one head; heads whose results nobody asks for
  int64_t first = 0, size = 0, stride = 0;  // stride: size, rounded up to whole vectors

  void reserve(int64_t heads) {
    constexpr int64_t L = Vec<T>::L;
    stride = (size + L - 1) / L * L;
    const size_t needed = static_cast<size_t>(heads * stride);
    for (auto* numbers : {&affinity, &weight}) {
      if (numbers->size() < needed) numbers->resize(needed);
    }
  }
};

template <class T, int D, bool RBF>
class Rows {
 public:
  explicit Rows(const RowsCall& call)
      : call_(call), scale_(static_cast<const T*>(call.scale)),
        bias_(static_cast<const T*>(call.bias)), repeats_(call.heads / call.kv_heads) {}

  void forward(int64_t b, int64_t i, Row<T>& row) const {
    T* lse = static_cast<T*>(call_.lse) + (b * call_.targets + i) * call_.heads;
    look(b, i, row);
    weigh(b, i, row, lse);
    const T* weight = averaged(b, i, row);
    const int64_t width = call_.value_width;
    T* out = at<T>(call_.out, b, i, 0);
    for (int64_t h = 0; h < call_.heads; ++h) std::fill_n(out + h * call_.out.head, width, T(0));
    for (int64_t first = 0; first < row.size; first += BLOCK) {
      const int64_t last = std::min(first + BLOCK, row.size);
      const bool direct = first == 0;
      if (!direct) row.block.assign(static_cast<size_t>(call_.heads * width), T(0));
      for (int64_t e = first; e < last; ++e) {
        if (e + AHEAD < row.size) {
          fetch_token<T>(call_.value, b, row.sources[e + AHEAD], call_.kv_heads, width);
        }
        const T* value = at<T>(call_.value, b, row.sources[e], 0);
        for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
          const T w = weight[h * row.stride + e];
          if (w < 0) return;
          T* into = direct ? out + h * call_.out.head : row.block.data() + h * width;
          add<T, D>(into, w, value + g * call_.value.head, width);
        });
      }
      if (direct) continue;
      for (int64_t h = 0; h < call_.heads; ++h) {
        add<T, D>(out + h * call_.out.head, T(1), row.block.data() + h * width, width);
      }
    }
  }

  // Gradients of a query, of scales (added), and the two numbers of each of its edges and heads.
  void backward_of_target(const RowsGradients& wanted, int64_t b, int64_t i, Row<T>& row, T* pairs,
                          double* d_scale) const {
    const int64_t H = call_.heads, width = call_.width, value_width = call_.value_width;
    const int64_t first = call_.rowptr[i], count = call_.rowptr[i + 1] - first;
    for (int64_t e = 0; e < count * H; ++e) {
      pairs[(first * H + e) * 2] = T(NOT_KEPT);
      pairs[(first * H + e) * 2 + 1] = T(0);
    }
    const T* query = at<T>(call_.query, b, i, 0);
    T* d_query = at<T>(wanted.d_query, b, i, 0);
    for (int64_t h = 0; h < H; ++h) std::fill_n(d_query + h * wanted.d_query.head, width, T(0));
    look(b, i, row);
    if (row.size == 0) return;
    weigh(b, i, row, nullptr);
    const T* weight = averaged(b, i, row);
    note_silent_heads(wanted, b, i, row);
    const T more = call_.drop_rows ? T(1 / (1 - call_.dropout)) : T(1);
    const T* d_out = at<const T>(wanted.d_out, b, i, 0);
    row.d_weight.assign(static_cast<size_t>(H * row.stride), T(0));
    for (int64_t e = 0; e < row.size; ++e) {
      const int64_t j = row.sources[e];
      if (e + AHEAD < row.size) {
        fetch_token<T>(call_.value, b, row.sources[e + AHEAD], call_.kv_heads, value_width);
      }
      const T* value = at<T>(call_.value, b, j, 0);
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        const int64_t place = h * row.stride + e;
        if (row.silent[h] || weight[place] < 0) return;
        row.d_weight[place] = more * dot<T, D>(d_out + h * wanted.d_out.head,
                                               value + g * call_.value.head, value_width);
      });
    }
    for (int64_t h = 0; h < H; ++h) {
      if (!row.silent[h]) d_scale[h] += gradients_of_logits(wanted, b, i, h, row, pairs);
    }
    for (int64_t e = 0; e < row.size; ++e) {
      if (e + AHEAD < row.size) {
        fetch_token<T>(call_.key, b, row.sources[e + AHEAD], call_.kv_heads, width);
      }
      const T* keys = at<T>(call_.key, b, row.sources[e], 0);
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        const int64_t place = h * row.stride + e;
        if (row.silent[h] || row.weight[place] < 0) return;
        T* into = d_query + h * wanted.d_query.head;
        const T* key = keys + g * call_.key.head;
        const T pull = row.d_weight[place];
        if (RBF) {
          add_difference<T, D>(into, pull, key, query + h * call_.query.head, width);
        } else {
          add<T, D>(into, pull, key, width);
        }
      });
    }
  }

  // Gradients of a key and a value, from the two numbers of all edges.
  void backward_of_source(const RowsGradients& wanted, int64_t b, int64_t j, Row<T>& row,
                          const T* pairs) const {
    const int64_t H = call_.heads, width = call_.width, value_width = call_.value_width;
    const T* key = at<T>(call_.key, b, j, 0);
    T* d_key = at<T>(wanted.d_key, b, j, 0);
    T* d_value = at<T>(wanted.d_value, b, j, 0);
    for (int64_t g = 0; g < call_.kv_heads; ++g) {
      std::fill_n(d_key + g * wanted.d_key.head, width, T(0));
      std::fill_n(d_value + g * wanted.d_value.head, value_width, T(0));
    }
    const int64_t begin = wanted.colptr[j], end = wanted.colptr[j + 1];
    const int64_t room = width + value_width;
    for (int64_t first = begin; first < end; first += BLOCK) {
      const int64_t last = std::min(first + BLOCK, end);
      const bool direct = first == begin;
      if (!direct) row.block.assign(static_cast<size_t>(call_.kv_heads * room), T(0));
      for (int64_t e = first; e < last; ++e) {
        const int64_t i = wanted.target[e];
        if (e + AHEAD < end) {
          const int64_t next = wanted.target[e + AHEAD];
          fetch_token<T>(call_.query, b, next, H, width);
          fetch_token<T>(wanted.d_out, b, next, H, value_width);
        }
        const T* pair = pairs + wanted.edge[e] * H * 2;
        const T* queries = at<T>(call_.query, b, i, 0);
        const T* d_out = at<const T>(wanted.d_out, b, i, 0);
        for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
          const T weight = pair[2 * h], pull = pair[2 * h + 1];
          if (weight == T(NOT_KEPT)) return;
          T* to_key = direct ? d_key + g * wanted.d_key.head : row.block.data() + g * room;
          T* to_value =
              direct ? d_value + g * wanted.d_value.head : row.block.data() + g * room + width;
          const T* query = queries + h * call_.query.head;
          if (RBF) {
            add_difference<T, D>(to_key, pull, query, key + g * call_.key.head, width);
          } else {
            add<T, D>(to_key, pull, query, width);
          }
          if (weight == T(DROPPED)) return;
          add<T, D>(to_value, weight, d_out + h * wanted.d_out.head, value_width);
        });
      }
      if (direct) continue;
      for (int64_t g = 0; g < call_.kv_heads; ++g) {
        const T* block = row.block.data() + g * room;
        add<T, D>(d_key + g * wanted.d_key.head, T(1), block, width);
        add<T, D>(d_value + g * wanted.d_value.head, T(1), block + width, value_width);
      }
    }
  }

 private:
  // f(h, g) for every query head h and its key head g.
  template <class F>
  GRAPHATTN_INLINE void for_heads(const F& f) const {
    for (int64_t g = 0, h = 0; g < call_.kv_heads; ++g) {
      for (int64_t r = 0; r < repeats_; ++r, ++h) f(h, g);
    }
  }

  // The edges between valid tokens.
  void look(int64_t b, int64_t i, Row<T>& row) const {
    row.first = call_.rowptr[i];
    row.size = 0;
    if (call_.valid_targets && !call_.valid_targets[b * call_.targets + i]) {
      row.reserve(call_.heads);
      return;
    }
    const int64_t count = call_.rowptr[i + 1] - row.first;
    if (static_cast<int64_t>(row.edges.size()) < count) {
      row.edges.resize(static_cast<size_t>(count));
      row.sources.resize(static_cast<size_t>(count));
    }
    const uint8_t* valid = call_.valid_sources;
    if (valid) valid += b * call_.sources;
    for (int64_t e = row.first; e < row.first + count; ++e) {
      const int64_t j = call_.source[e];
      if (valid && !valid[j]) continue;
      row.edges[row.size] = e;
      row.sources[row.size++] = j;
    }
    row.reserve(call_.heads);
  }

  // Weights before dropout, and the logarithms of their sums.
  void weigh(int64_t b, int64_t i, Row<T>& row, T* lse) const {
    const int64_t width = call_.width;
    const T* queries = at<T>(call_.query, b, i, 0);
    for (int64_t e = 0; e < row.size; ++e) {
      const int64_t j = row.sources[e];
      if (e + AHEAD < row.size) {
        fetch_token<T>(call_.key, b, row.sources[e + AHEAD], call_.kv_heads, width);
      }
      const T* keys = at<T>(call_.key, b, j, 0);
      for_heads([&](int64_t h, int64_t g) __attribute__((always_inline)) {
        const T* query = queries + h * call_.query.head;
        const T* key = keys + g * call_.key.head;
        row.affinity[h * row.stride + e] =
            RBF ? squared_distance<T, D>(query, key, width) / -2 : dot<T, D>(query, key, width);
      });
    }
    for (int64_t h = 0; h < call_.heads; ++h) {
      const T found = softmax(b, h, row);
      if (lse) lse[h] = found;
    }
  }

  T capped(T logit) const {
    const T cap = T(call_.softcap);
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
  }

  // Weights of one head in the place of its affinities' logits; returns their log-sum.
  T softmax(int64_t b, int64_t h, Row<T>& row) const {
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
      const int64_t* table = call_.bias_row;
      for (int64_t e = 0; e < row.size; ++e) {
        const int64_t edge = row.edges[e];
        weight[e] += bias[(table ? table[edge] : edge) * call_.heads];
      }
    }
    for (int64_t e = row.size; e < row.stride; ++e) weight[e] = NONE;
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
    for (int64_t first = 0; first < row.stride; first += BLOCK) {
      vec<T> part{};
      for (int64_t e = first; e < std::min(first + BLOCK, row.stride); e += L) {
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
      const int64_t hash = call_.drop_rows[(b * call_.targets + i) * call_.heads + h];
      const uint32_t low = static_cast<uint32_t>(hash);
      const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(hash) >> 32);
      for (int64_t e = h * row.stride; e < h * row.stride + row.size; ++e) {
        const uint32_t column = call_.drop_columns[row.sources[e - h * row.stride]];
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
    const T* found = static_cast<const T*>(wanted.d_lse);
    return found ? found[(b * call_.targets + i) * call_.heads + h] : T(0);
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
    for (int64_t e = 0; e < row.size; ++e) {
      if (weight[e] >= 0 || std::isnan(weight[e])) mean += double(weight[e]) * double(d_weight[e]);
    }
    const T less = T(mean) - d_lse(wanted, b, i, h);
    const T cap = T(call_.softcap);
    T* d_bias = static_cast<T*>(wanted.d_bias);
    if (d_bias) d_bias += b * wanted.d_bias_batch + h;
    for (int64_t e = 0; e < row.size; ++e) {
      if (weight[e] < 0) continue;
      T found = weight[e] * (d_weight[e] - less);
      if (d_bias) d_bias[row.edges[e] * call_.heads] += found;
      if (cap > 0) {
        const T bounded = std::tanh(scale_[h] * affinity[e] / cap);
        found *= 1 - bounded * bounded;
      }
      d_scale += double(found) * double(affinity[e]);
      d_weight[e] = scale_[h] * found;
      T* pair = pairs + (row.edges[e] * call_.heads + h) * 2;
      pair[0] = read[e];
      pair[1] = d_weight[e];
    }
    return d_scale;
  }

  const RowsCall& call_;
  const T* scale_;
  const T* bias_;
  const int64_t repeats_;  // query heads of a key head
};

// Rows in tasks of about the same number of edges; how they are cut depends on the graph alone.
class Tasks {
 public:
  Tasks(const int64_t* rowptr, int64_t rows)
      : rowptr_(rowptr), rows_(rows), count_(std::clamp<int64_t>(rows / 4, 1, TASKS)) {}

  int64_t count() const { return count_; }

  int64_t first(int64_t task) const {
    if (task == 0) return 0;
    if (task == count_) return rows_;
    const int64_t edge = static_cast<int64_t>(double(rowptr_[rows_]) * task / count_);
    // Rows without edges cost something, too.
    const int64_t by_edges = std::lower_bound(rowptr_, rowptr_ + rows_, edge) - rowptr_;
    return by_edges;
  }

 private:
  const int64_t* rowptr_;
  int64_t rows_, count_;
};

int threads_for(const RowsCall& call) {
  const double edges = double(call.rowptr[call.targets]) * double(call.batch);
  return threads_worth(edges * double(call.heads * (call.width + call.value_width)),
                       static_cast<int>(call.threads));
}

template <class T, int D, bool RBF>
void forward(const RowsCall& call) {
  const Rows<T, D, RBF> rows(call);
  huge(call.out.data, call.batch * call.targets * call.heads * call.value_width * sizeof(T));
  const Tasks tasks(call.rowptr, call.targets);
  const int threads = threads_for(call);
  std::vector<Row<T>> own(static_cast<size_t>(std::max(threads, 1)));
  parallel_tasks(tasks.count(), threads, [&](int64_t task, int worker) {
    for (int64_t b = 0; b < call.batch; ++b) {
      for (int64_t i = tasks.first(task); i < tasks.first(task + 1); ++i) {
        rows.forward(b, i, own[worker]);
      }
    }
  });
}

template <class T, int D, bool RBF>
void backward(const RowsCall& call, const RowsGradients& wanted) {
  const Rows<T, D, RBF> rows(call);
  const Tasks of_targets(call.rowptr, call.targets), of_sources(wanted.colptr, call.sources);
  const int threads = threads_for(call);
  std::vector<Row<T>> own(static_cast<size_t>(std::max(threads, 1)));
  const int64_t H = call.heads, numbers = call.rowptr[call.targets] * H * 2;
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
        for (int64_t i = of_targets.first(task); i < of_targets.first(task + 1); ++i) {
          rows.backward_of_target(wanted, b, i, own[worker], pairs.data() + (b - first) * numbers,
                                  d_scale.data() + task * H);
        }
      }
    });
    parallel_tasks(of_sources.count(), threads, [&](int64_t task, int worker) {
      for (int64_t b = first; b < last; ++b) {
        for (int64_t j = of_sources.first(task); j < of_sources.first(task + 1); ++j) {
          rows.backward_of_source(wanted, b, j, own[worker], pairs.data() + (b - first) * numbers);
        }
      }
    });
  }
  for (int64_t task = 0; task < of_targets.count(); ++task) {
    for (int64_t h = 0; h < H; ++h) wanted.d_scale[h] += d_scale.data()[task * H + h];
  }
}

template <class T, int D>
void run(const RowsCall& call, const RowsGradients* wanted) {
  if (wanted) {
    call.is_rbf ? backward<T, D, true>(call, *wanted) : backward<T, D, false>(call, *wanted);
  } else {
    call.is_rbf ? forward<T, D, true>(call) : forward<T, D, false>(call);
  }
}

template <class T>
void run(const RowsCall& call, const RowsGradients* wanted) {
  // Widths that are known take a quarter less time; of float64 nobody waits for it.
  if constexpr (std::is_same_v<T, float>) {
    switch (call.width == call.value_width ? call.width : 0) {
      case 16: return run<T, 16>(call, wanted);
      case 32: return run<T, 32>(call, wanted);
      case 64: return run<T, 64>(call, wanted);
      case 128: return run<T, 128>(call, wanted);
    }
  }
  run<T, 0>(call, wanted);
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
