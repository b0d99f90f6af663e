// A step of generation: the newest few tokens of every text attend to a cache, where it lies.
//
// Every key is read once for all queries that share it, and so is every value. A row, which is one
// query and head, is summed up by itself and in an order that depends on what it sees alone: it has
// the same bits for any number of threads, wherever in a ring its tokens stand, and whatever else is
// in the call. Distances are sums of squared differences, and equal keys have equal logits.

#include "steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "band_tiles.h"
#include "band_top_k.h"
#include "feature_sums.h"
#include "interface.h"
#include "precision.h"
#include "simd.h"
#include "tasks.h"
#include "tokens.h"

namespace graphattn {
namespace {

constexpr int64_t EXPONENTIALS = 256;  // so many before they join a sum of float64

struct Identity {
  int32_t number[BLOCK];
  constexpr Identity() : number() {
    for (int32_t i = 0; i < BLOCK; ++i) number[i] = i;
  }
};
constexpr Identity IDENTITY;

// One query and head.
template <class T>
struct Row {
  int64_t low, high;  // what it sees of the text's list of tokens
  int64_t kept;       // how many of these top-k leaves, listed apart; -1: all
  T most;             // the largest logit
  double whole;       // the sum of exp(logit - most); 0: the row sees nothing
};

// The memory of a thread.
template <class T>
struct Memory {
  std::vector<int32_t> places;  // of the tokens that a text's queries see
  std::vector<Row<T>> rows;     // [key heads of a task, queries, heads that share a key head]
  std::vector<T> queries, weights, sums, block, room;
  std::vector<uint16_t> halves;
  std::vector<Ordered<T>> order;
  std::vector<int32_t> kept;  // [rows, stride]: places
};

template <class T>
class Steps {
 public:
  explicit Steps(const StepsCall& call)
      : call_(call), loops_(token_loops<T>(call.width, call.value_width, call.is_rbf)),
        shared_(call.heads / call.kv_heads) {}

  // Queries of a text that read key heads first .. last - 1.
  void run(int64_t b, int64_t first, int64_t last, Memory<T>& own) const {
    list_tokens(b, own);
    const int64_t count = (last - first) * call_.queries * shared_;
    own.rows.resize(static_cast<size_t>(count));
    own.queries.resize(static_cast<size_t>(count * call_.width));
    own.sums.resize(static_cast<size_t>(count * call_.value_width));
    own.block.resize(static_cast<size_t>(3 * std::max(call_.value_width, call_.width)));
    own.halves.resize(static_cast<size_t>(call_.width));
    if (is_half<T>(call_.key) || is_half<T>(call_.value)) {
      own.room.resize(static_cast<size_t>(BLOCK * std::max(call_.width, call_.value_width)));
    }
    const int64_t size = static_cast<int64_t>(own.places.size());
    const int64_t stride = whole_vectors<T>(size);
    own.weights.resize(static_cast<size_t>(count * stride));
    for (int64_t g = first; g < last; ++g) {
      put_newest(b, g, own);
      for_rows(g, first, [&](int64_t r, int64_t t, int64_t h) {
        see(b, t, size, own.rows[r]);
        T* query = own.queries.data() + r * call_.width;
        const T* from = read_head(call_.query, b, t, h, call_.width, query);
        if (from != query) std::copy_n(from, call_.width, query);
        turn(b, query, call_.query.kind, own);
      });
    }
    find_logits(b, first, last, stride, own);
    for (int64_t g = first; g < last; ++g) {
      for_rows(g, first, [&](int64_t r, int64_t, int64_t h) { weigh(r, h, stride, own); });
    }
    average(b, first, last, stride, own);
    for (int64_t g = first; g < last; ++g) {
      for_rows(g, first, [&](int64_t r, int64_t t, int64_t h) { finish(b, t, h, r, own); });
    }
  }

 private:
  static constexpr T NONE = -std::numeric_limits<T>::infinity();

  int64_t length(int64_t b) const { return call_.lengths ? call_.lengths[b] : call_.held; }

  // The first token that a query of the text sees.
  int64_t oldest(int64_t b) const {
    const int64_t first = length(b) - call_.queries;
    return call_.window ? std::max<int64_t>(0, first - call_.window + 1) : 0;
  }

  int64_t place(int64_t token) const {
    const int64_t at = call_.first + token;
    return at < call_.room ? at : at - call_.room;
  }

  void list_tokens(int64_t b, Memory<T>& own) const {
    const int64_t end = length(b), begin = std::min(oldest(b), end);
    const uint8_t* valid = call_.valid ? call_.valid + b * call_.room : nullptr;
    own.places.resize(static_cast<size_t>(end - begin));
    if (!valid) {
      const int64_t turn = std::clamp(call_.room - call_.first, begin, end);
      int32_t* to = own.places.data() - begin;
      for (int64_t j = begin; j < turn; ++j) to[j] = static_cast<int32_t>(call_.first + j);
      for (int64_t j = turn; j < end; ++j) to[j] = static_cast<int32_t>(call_.first + j - call_.room);
      return;
    }
    int64_t found = 0;
    const bool sees = end > begin && valid[place(end - 1)];  // padding sees nothing
    for (int64_t j = begin; sees && j < end; ++j) {
      own.places[found] = static_cast<int32_t>(place(j));
      found += valid[place(j)] != 0;
    }
    own.places.resize(static_cast<size_t>(found));
  }

  // What a query sees of that list.
  void see(int64_t b, int64_t t, int64_t size, Row<T>& row) const {
    row.low = 0, row.high = size, row.kept = -1;
    if (call_.valid) return;
    const int64_t position = length(b) - call_.queries + t, begin = oldest(b);
    row.high = std::max<int64_t>(0, position + 1 - begin);
    if (call_.window) row.low = std::max<int64_t>(0, position - call_.window + 1 - begin);
    row.low = std::min(row.low, row.high);
  }

  // f(row, query, head) for the queries that read key head g.
  template <class F>
  GRAPHATTN_INLINE void for_rows(int64_t g, int64_t first, const F& f) const {
    int64_t r = (g - first) * call_.queries * shared_;
    for (int64_t t = 0; t < call_.queries; ++t) {
      for (int64_t h = g * shared_; h < (g + 1) * shared_; ++h) f(r++, t, h);
    }
  }

  // Features turned by the angles of the newest token, rounded wherever operations of torch would
  // round, so that it does not matter who turns: each product by itself, and the sum to `kind`.
  void turn(int64_t b, T* x, int64_t kind, Memory<T>& own) const {
    if (!call_.cosines) return;
    const int64_t half = call_.width / 2;
    const T* cosine = static_cast<const T*>(call_.cosines) + b * call_.turn_batch;
    const T* sine = static_cast<const T*>(call_.sines) + b * call_.turn_batch;
    T *along = own.block.data(), *across = along + call_.width;
    for (int64_t d = 0; d < half; ++d) {
      along[d] = x[d] * cosine[d], along[half + d] = x[half + d] * cosine[d];
      across[d] = x[half + d] * sine[d], across[half + d] = x[d] * sine[d];
    }
    __asm__ volatile("" ::: "memory");  // or a product and a sum become one operation
    for (int64_t d = 0; d < half; ++d) {
      x[d] = along[d] - across[d];
      x[half + d] = along[half + d] + across[half + d];
    }
    if constexpr (sizeof(T) == sizeof(float)) {
      if (kind == AS_COMPUTED) return;
      uint16_t* rounded = own.halves.data();
      narrow(x, kind == FLOAT16, call_.width, rounded);
      widen(rounded, kind == FLOAT16, call_.width, x);
    }
  }

  // Writes one head of the newest token into the cache.
  void put_newest(int64_t b, int64_t g, Memory<T>& own) const {
    const int64_t newest = place(length(b) - 1);
    if (call_.new_key.data) {
      T* key = own.block.data() + 2 * call_.width;
      const T* from = read_head(call_.new_key, b, 0, g, call_.width, key);
      if (from != key) std::copy_n(from, call_.width, key);
      turn(b, key, call_.new_key.kind, own);
      write_head(key, call_.width, call_.key, b, newest, g);
    }
    if (call_.new_value.data) {
      const T* from =
          read_head(call_.new_value, b, 0, g, call_.value_width, own.block.data());
      write_head(from, call_.value_width, call_.value, b, newest, g);
    }
  }

  // Some tokens of a key head, where they lie or as floats in `room`.
  TokenLoop<T> loop_over(const TokenView& view, int64_t b, int64_t g, const int32_t* places,
                         int64_t count, int64_t width, Memory<T>& own) const {
    const Heads<const T> none{nullptr, 0, 0};
    TokenLoop<T> loop{1, 1, width, width, 0, nullptr, none, none, places, nullptr, count, 0};
    if constexpr (sizeof(T) == sizeof(float)) {
      if (is_half<T>(view)) {
        loop.tokens.first = own.room.data();
        loop.token = IDENTITY.number;
        for (int64_t e = 0; e < count; ++e) {
          widen(at<const uint16_t>(view, b, places[e], g), view.kind == FLOAT16, width,
                own.room.data() + e * width);
        }
        return loop;
      }
    }
    loop.tokens.first = at<const T>(view, b, 0, g);
    loop.stride = view.token;
    return loop;
  }

  // The same for places j .. end - 1 of the list; those of the block after are fetched meanwhile.
  TokenLoop<T> loop_over_block(const TokenView& view, int64_t b, int64_t g, int64_t j, int64_t end,
                               int64_t width, Memory<T>& own) const {
    const int64_t size = static_cast<int64_t>(own.places.size());
    TokenLoop<T> loop = loop_over(view, b, g, own.places.data() + j, end - j, width, own);
    if (!is_half<T>(view)) {
      loop.next = own.places.data() + end;
      loop.next_count = std::min(BLOCK, size - end);
    }
    return loop;
  }

  // f(r, e, loop) for every row of key head g that sees something of a block, whose first place of
  // the row's list is e.
  template <class F>
  GRAPHATTN_INLINE void for_rows_of_block(int64_t g, int64_t first, int64_t j, int64_t end,
                                          const TokenLoop<T>& block, const Memory<T>& own,
                                          const F& f) const {
    TokenLoop<T> loop = block;
    for_rows(g, first, [&](int64_t r, int64_t, int64_t) __attribute__((always_inline)) {
      const Row<T>& row = own.rows[r];
      const int64_t low = std::max(row.low, j), high = std::min(row.high, end);
      if (row.kept >= 0 || low >= high) return;
      loop.token = block.token + (low - j), loop.count = high - low;
      f(r, low - row.low, loop);
      loop.next_count = 0;  // the first row fetches them
    });
  }

  // Whether `for_rows_of_block` has anything to do: values are converted for nobody else.
  bool is_read(int64_t g, int64_t first, int64_t j, int64_t end, const Memory<T>& own) const {
    bool found = false;
    for_rows(g, first, [&](int64_t r, int64_t, int64_t) {
      const Row<T>& row = own.rows[r];
      found = found || (row.kept < 0 && std::max(row.low, j) < std::min(row.high, end));
    });
    return found;
  }

  // Affinities of all rows, a block of keys after the other.
  void find_logits(int64_t b, int64_t first, int64_t last, int64_t stride, Memory<T>& own) const {
    const int64_t size = static_cast<int64_t>(own.places.size());
    for (int64_t j = 0; j < size; j += BLOCK) {
      const int64_t end = std::min(size, j + BLOCK);
      for (int64_t g = first; g < last; ++g) {
        const TokenLoop<T> keys = loop_over_block(call_.key, b, g, j, end, call_.width, own);
        for_rows_of_block(g, first, j, end, keys, own,
                          [&](int64_t r, int64_t e, TokenLoop<T>& loop) __attribute__((always_inline)) {
          loop.own.first = own.queries.data() + r * call_.width;
          loops_.affinities(loop, own.weights.data() + r * stride + e);
        });
      }
    }
  }

  T scale(int64_t h) const {
    if (!call_.scale) return T(call_.same_scale);
    const T given = static_cast<const T*>(call_.scale)[h * call_.scale_step];
    return call_.is_log_sigma ? std::exp(T(-2) * given) : given;
  }

  // Weights of a row in the place of its affinities, before they are divided by their sum.
  void weigh(int64_t r, int64_t h, int64_t stride, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    Row<T>& row = own.rows[r];
    T* weight = own.weights.data() + r * stride;
    const int64_t size = row.high - row.low;
    int64_t padded = whole_vectors<T>(size);
    row.most = NONE, row.whole = 0;
    const T cap = T(call_.softcap), strength = scale(h);
    for (int64_t e = size; e < padded; ++e) weight[e] = T(0);
    vec<T> most = broadcast(NONE), wrong{};
    for (int64_t e = 0; e < padded; e += L) {
      vec<T> logit = load(weight + e) * strength;
      if (cap > 0) logit = tanh(logit / cap) * cap;
      if (e + L > size) {
        for (int64_t i = size - e; i < L; ++i) logit[i] = NONE;
      }
      most = maximum(most, logit);
      wrong += logit == logit ? vec<T>{} : broadcast(T(1));
      store(weight + e, logit);
    }
    row.most = largest(most);
    const bool is_number = sum(wrong) == 0;
    if (row.most == NONE && is_number) {
      row.high = row.low;
      return;
    }
    if (is_number && call_.top_k > 0 && call_.top_k < size) {
      padded = keep_largest(row, r, stride, size, own);
    }
    for (int64_t first = 0; first < padded; first += EXPONENTIALS) {
      vec<T> part{};
      for (int64_t e = first; e < std::min(first + EXPONENTIALS, padded); e += L) {
        const vec<T> exponential = exp(load(weight + e) - broadcast(row.most));
        store(weight + e, exponential);
        part += exponential;
      }
      row.whole += sum(part);
    }
  }

  // Leaves the `top_k` largest logits, of equal ones the first, and lists where they stand.
  int64_t keep_largest(Row<T>& row, int64_t r, int64_t stride, int64_t size, Memory<T>& own) const {
    T* logit = own.weights.data() + r * stride;
    const int64_t padded = whole_vectors<T>(size);
    own.order.resize(static_cast<size_t>(stride));
    own.kept.resize(own.rows.size() * static_cast<size_t>(stride));
    const Largest<T> best = find_largest(logit, padded, call_.top_k, own.order.data());
    const int32_t* place = own.places.data() + row.low;
    int32_t* to = own.kept.data() + r * stride;
    int64_t kept = 0;
    for (int64_t e = 0; e < size; ++e) {
      const T one = logit[e];
      to[kept] = place[e], logit[kept] = one;  // kept is at most e
      kept += (one > best.threshold) | ((one == best.threshold) & (e <= best.last) & (one != NONE));
    }
    const int64_t end = whole_vectors<T>(kept);
    for (int64_t e = kept; e < end; ++e) logit[e] = NONE;
    row.kept = kept;
    return end;
  }

  // The sums of weighted values of all rows, a block of values after the other.
  void average(int64_t b, int64_t first, int64_t last, int64_t stride, Memory<T>& own) const {
    const int64_t size = static_cast<int64_t>(own.places.size()), width = call_.value_width;
    for (int64_t j = 0; j < size; j += BLOCK) {
      const int64_t end = std::min(size, j + BLOCK);
      for (int64_t g = first; g < last; ++g) {
        if (!is_read(g, first, j, end, own)) continue;
        const TokenLoop<T> values = loop_over_block(call_.value, b, g, j, end, width, own);
        for_rows_of_block(g, first, j, end, values, own,
                          [&](int64_t r, int64_t e, const TokenLoop<T>& loop) __attribute__((always_inline)) {
          add_block(r, stride, e, loop, own);
        });
      }
    }
    for (int64_t g = first; g < last; ++g) {
      for_rows(g, first, [&](int64_t r, int64_t, int64_t) {
        const Row<T>& row = own.rows[r];
        const int32_t* kept = own.kept.data() + r * stride;
        for (int64_t e = 0; e < row.kept; e += BLOCK) {
          const int64_t count = std::min(BLOCK, row.kept - e);
          add_block(r, stride, e, loop_over(call_.value, b, g, kept + e, count, width, own), own);
        }
      });
    }
  }

  // Adds values whose weights stand from place e on.
  void add_block(int64_t r, int64_t stride, int64_t e, const TokenLoop<T>& values,
                 Memory<T>& own) const {
    const T* weight = own.weights.data() + r * stride + e;
    T* sums = own.sums.data() + r * call_.value_width;
    loops_.sums(values, weight, weight, NONE, {sums, 0, 0}, e ? own.block.data() : nullptr);
  }

  // Writes what a row has found.
  void finish(int64_t b, int64_t t, int64_t h, int64_t r, Memory<T>& own) const {
    const Row<T>& row = own.rows[r];
    T* sums = own.sums.data() + r * call_.value_width;
    const bool empty = row.low >= row.high;
    const double lse = double(row.most) + std::log(row.whole);
    double beside = 1;
    if (call_.eps > 0) beside += call_.eps * std::exp(-lse);
    if (call_.sink) beside += std::exp(double(static_cast<const T*>(call_.sink)[h]) - lse);
    const T share = T(1 / (row.whole * beside));
    for (int64_t d = 0; d < call_.value_width; ++d) sums[d] = empty ? T(0) : sums[d] * share;
    write_head(sums, call_.value_width, call_.out, b, t, h);
    if (call_.lse) {
      static_cast<T*>(call_.lse)[(b * call_.queries + t) * call_.heads + h] =
          empty ? NONE : T(lse);
    }
  }

  const StepsCall& call_;
  const TokenLoops<T> loops_;
  const int64_t shared_;  // query heads of a key head
};

// Which of the newest tokens are real, before any thread reads it.
void note_valid(const StepsCall& call) {
  if (!call.valid || !call.new_key.data) return;
  const int64_t newest = (call.first + call.held - 1) % call.room;
  for (int64_t b = 0; b < call.texts; ++b) {
    call.valid[b * call.room + newest] =
        call.new_valid ? call.new_valid[b * call.new_valid_step] : uint8_t(1);
  }
}

template <class T>
void run(const StepsCall& call) {
  note_valid(call);
  const Steps<T> steps(call);
  const int64_t most = std::min(call.held, call.window ? call.window + call.queries : call.held);
  const double numbers = double(call.texts) * double(most) * double(call.heads * call.queries);
  const int threads = threads_worth(numbers * double(call.width + call.value_width),
                                    static_cast<int>(call.threads));
  // Where the heads of a token lie side by side, a thread reads them together. How heads are dealt
  // out changes no bit.
  int64_t parts = call.kv_heads;
  if (call.key.head < call.key.token) {
    const int64_t texts = std::max<int64_t>(1, call.texts);
    parts = std::min(parts, (threads + texts - 1) / texts);
  }
  if (parts == 0) return;
  std::vector<Memory<T>> own(static_cast<size_t>(std::max(threads, 1)));
  parallel_tasks(call.texts * parts, threads, [&](int64_t task, int worker) {
    const int64_t part = task % parts;
    steps.run(task / parts, part * call.kv_heads / parts, (part + 1) * call.kv_heads / parts,
              own[worker]);
  });
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_attention_steps(const graphattn::StepsCall* call,
                                                int32_t is_double) {
  return graphattn::guarded([&] {
    if (call->room > graphattn::MOST_TOKENS) throw std::length_error("tokens");
    is_double ? graphattn::run<double>(*call) : graphattn::run<float>(*call);
  });
}
