// Attention over bands: windows, blocks and whatever else is sequences of tokens in which target i
// sees the sources i - before .. i + after; forward and backward.
//
// A task is one key head and up to 1,024 targets of one sequence. Its keys and values are packed
// once; then a few targets at a time meet a few vectors of keys in registers. How a sequence is cut
// depends on the sequence alone, and every row is summed up in an order of its own, so results are
// the same for any number of threads and beside any other sequence. The backward goes over blocks
// of 64 targets and 64 keys once. A task writes the gradients of the keys up to where the next one
// begins; what belongs to later keys goes to memory of its own, and is added afterwards in order.
//
// Narrow windows take other ways through the same tasks (band_diagonals.h).
//
// Tiles hold zeros in place of tokens with NaN, infinity or enormous numbers. Rows that see one are
// computed by themselves, in double precision (band_rows.h), and so are rows for which float has too
// few digits: nearly a tie in top-k, or RBF logits that are all far below zero.

#include "bands.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "band_forward.h"
#include "band_plan.h"
#include "band_rows.h"
#include "band_tiles.h"
#include "feature_sums.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t MOST_ENTRIES = 1 << 22;  // of tables that tasks add to at a time: 32 MB

template <class T>
class BandsBackward : public Bands<T> {
 public:
  using Bands<T>::Bands;

  // d_scale: [repeats] of this task; d_table: [repeats, window]; halo: of this task.
  void backward(const Task& task, int64_t b, int64_t g, const BandsGradients& wanted,
                Packed<T>& own, Backward<T>& back, double* d_scale, double* d_table, T* halo,
                uint8_t* special, std::atomic<bool>& any_special) {
    int64_t keys = 0;
    if (!task.is_narrow) pack_keys(task, b, g, own, &back);
    std::fill_n(back.d_keys, task.keys * padded_, T(0));
    std::fill_n(back.d_values, task.keys * value_padded_, T(0));
    for (int64_t r = 0; r < repeats_; ++r) {
      const int64_t h = g * repeats_ + r;
      double* table = d_table ? d_table + r * plan_.window : nullptr;
      for (int64_t i = task.first; i < task.last; i += BLOCK) {
        if (pack_targets(task, b, h, i, wanted, own, back, special)) any_special = true;
        if (task.is_narrow) {
          pack_rows(task, b, g, keys_until(task, i + BLOCK - Vec<T>::L) + SPARE, keys, own);
          d_scale[r] += backward_diagonals(task, b, h, i, wanted.d_out, own, back, table);
        } else {
          d_scale[r] += backward_block(task, h, i, own, back, table);
        }
        const int64_t count = std::min(BLOCK, task.last - i);
        for (int64_t y = 0; y < count; ++y) {
          write_head(back.d_query + y * padded_, call_.width, wanted.d_query, b,
                     token_of(task, i + y), h);
        }
      }
    }
    put_gradients(task, b, g, wanted, back, halo);
  }

  // Adds what earlier tasks of the sequence have found for a task's own keys.
  void add_halos(size_t place, int64_t b, int64_t g, const BandsGradients& wanted, const T* halos) {
    const Task& task = plan_.tasks[place];
    for (size_t n = place; n-- > 0 && plan_.tasks[n].sequence == task.sequence;) {
      const Task& other = plan_.tasks[n];
      if (other.high <= task.own_low) break;
      const int64_t from = std::max(other.own_high, other.low);
      const int64_t end = std::min(other.high, task.own_high);
      for (int64_t j = std::max(from, task.own_low); j < end; ++j) {
        const T* found = halos + (other.halo + j - from) * room();
        const int64_t token = task.sequence->source + j * task.sequence->step;
        add<T, 0>(at<T>(wanted.d_key, b, token, g), T(1), found, call_.width);
        add<T, 0>(at<T>(wanted.d_value, b, token, g), T(1), found + call_.width,
                  call_.value_width);
      }
    }
  }

  int64_t room() const { return call_.width + call_.value_width; }

 private:
  using Base = Bands<T>;
  using Base::MOST;
  using Base::call_;
  using Base::diagonals;
  using Base::kept_of;
  using Base::keys_until;
  using Base::limits_;
  using Base::logits_of;
  using Base::logits_of_diagonals;
  using Base::logits_of_tile;
  using Base::pack_keys;
  using Base::pack_rows;
  using Base::padded_;
  using Base::plan_;
  using Base::repeats_;
  using Base::tile;
  using Base::token_of;
  using Base::value_padded_;

  // Up to BLOCK targets of one head; marks those that are left to BandRow, returns whether one is.
  bool pack_targets(const Task& task, int64_t b, int64_t h, int64_t i,
                    const BandsGradients& wanted, const Packed<T>& own, Backward<T>& back,
                    uint8_t* special) const {
    const int64_t width = call_.width, value_width = call_.value_width;
    const T* d_lse = static_cast<const T*>(wanted.d_lse);
    bool some = false;
    const T *queries[QUERIES], *upstreams[QUERIES], *outs[QUERIES];
    for (int64_t y = 0; y < BLOCK; ++y) {
      const T *&query = queries[y % QUERIES], *&d_out = upstreams[y % QUERIES];
      const T*& out = outs[y % QUERIES];
      query = d_out = out = nullptr;
      back.highest[y] = MOST, back.share[y] = 0, back.less[y] = 0;
      back.threshold[y] = MOST, back.last[y] = 0;
      if (i + y < task.last) {
        const int64_t target = token_of(task, i + y);
        const int64_t next = token_of(task, std::min(i + y + AHEAD, task.last - 1));
        if (!task.is_narrow) {
          fetch_head<T>(call_.query, b, next, h, width);
          fetch_head<T>(wanted.d_out, b, next, h, value_width);
        }
        prefetch(this->exact_output(b, next, h), value_width * sizeof(T));
        const T* kept = kept_of(b, target, h);
        const T of_lse = d_lse ? d_lse[(b * call_.targets + target) * call_.heads + h] : T(0);
        const auto room = [&](int64_t n) { return own.room_of(y % QUERIES * 2 + n); };
        const T* upstream = read_head(wanted.d_out, b, target, h, value_width, room(0));
        const bool dead = kept[0] == MOST && kept[1] == 0;
        bool left = !dead && kept[0] == MOST;
        if (!dead) {
          left = left || !is_sound(upstream, value_width, limits_[h]) ||
                 !is_sound(&of_lse, 1, limits_[h]);
        }
        if (left && !is_silent(upstream, of_lse)) {
          special[(b * call_.heads + h) * call_.targets + target] = 1, some = true;
        }
        if (!dead && !left) {
          d_out = upstream;
          query = read_head(call_.query, b, target, h, width, room(1));
          back.highest[y] = kept[0], back.share[y] = kept[1];
          if (call_.top_k > 0) back.threshold[y] = kept[2], back.last[y] = kept[3];
          out = this->exact_output(b, target, h);
          back.less[y] = of_lse;
        }
      }
      put_row(query, width, back.query_rows + y * padded_, padded_);
      put_row(d_out, value_width, back.d_out_rows + y * value_padded_, value_padded_);
      if (task.is_narrow) {
        constexpr int64_t L = Vec<T>::L;
        put_row(out, value_width, back.out + y % L * value_padded_, value_padded_);
        if ((y + 1) % L == 0) output_products_less(y + 1 - L, own, back);
      } else if ((y + 1) % QUERIES == 0) {
        const int64_t few = y + 1 - QUERIES;
        put_columns<T, QUERIES>(queries, width, back.query + few * width, QUERIES);
        T* columns = back.d_out + few * value_width;
        put_columns<T, QUERIES>(upstreams, value_width, columns, QUERIES);
        put_columns<T, QUERIES>(outs, value_width, back.out, QUERIES);
        products_less(columns, back.out, value_width, back.less + few);
      }
    }
    return some;
  }

  // The product of the output and its gradient for targets y .. y + L - 1, less what `less` holds. It
  // has the bits of an affinity, so a weight of 1 leaves nothing of the gradient of its logit.
  void output_products_less(int64_t y, const Packed<T>& own, Backward<T>& back) const {
    T found[Vec<T>::L];
    this->diagonals(false, back.d_out_rows + y * value_padded_, back.out, value_padded_, 1, nullptr,
                    own, found);
    store(back.less + y, load(found) - load(back.less + y));
  }

  bool is_silent(const T* d_out, T d_lse) const {
    bool silent = d_lse == 0;
    for (int64_t d = 0; silent && d < call_.value_width; ++d) silent = d_out[d] == 0;
    return silent;
  }

  // Weights of logits; with top-k, of those above the least one kept, or equal to it up to a number
  // in the window.
  GRAPHATTN_INLINE vec<T> weight_of(vec<T> logit, vec<T> number, vec<T> highest, vec<T> share,
                                    vec<T> least, vec<T> last) const {
    const vec<T> p = exp(logit - highest) * share;
    if (call_.top_k == 0) return p;
    return ((logit > least) | ((logit == least) & (number <= last))) ? p : vec<T>{};
  }

  // The gradient of a logit as that of the logit before the cap.
  GRAPHATTN_INLINE vec<T> through_cap(const Logits<T>& how, vec<T> affinity, vec<T> d_logit) const {
    if (!(how.cap > 0)) return d_logit;
    const vec<T> bounded = tanh(affinity * how.scale / how.cap);
    return d_logit * (T(1) - bounded * bounded);
  }

  // Targets i .. i + BLOCK - 1 with all their keys; returns the gradient of the scale.
  double backward_block(const Task& task, int64_t h, int64_t i, Packed<T>& own, Backward<T>& back,
                        double* d_table) const {
    constexpr int64_t L = Vec<T>::L;
    const Sequence& s = *task.sequence;
    const int64_t last = std::min(task.last, i + BLOCK);
    const int64_t from = std::max(task.low, i - s.before);
    const int64_t end = std::max(from, std::min(task.high, last + s.after));
    std::fill_n(back.d_query, BLOCK * padded_, T(0));
    if (d_table) std::fill_n(back.d_table, plan_.window + 2 * MARGIN, T(0));
    double d_scale = 0;
    for (int64_t j = from / BLOCK * BLOCK; j < end; j += BLOCK) {
      for (int64_t r = i; r < last; r += QUERIES) {
        const int64_t most = std::min(task.high, r + QUERIES + s.after);
        for (int64_t k = j; k < std::min(j + BLOCK, most);) {
          const bool whole = k % KEYS<T> == 0 && k + L < most && k + L > r - s.before;
          if (whole || k + L > r - s.before) {
            d_scale += backward_tile(whole, task, h, r, r - i, k, k - j, own, back,
                                     d_table != nullptr);
          }
          k += whole ? KEYS<T> : L;
        }
      }
      pull_queries(task, i, last, j, back);
      pull_keys(task, i, last, j, std::min(j + BLOCK, end), back);
    }
    if (d_table) {
      for (int64_t e = 0; e < plan_.window; ++e) d_table[e] += double(back.d_table[MARGIN + e]);
    }
    return d_scale;
  }

  // The same for a narrow window.
  double backward_diagonals(const Task& task, int64_t b, int64_t h, int64_t i,
                            const TokenView& d_out_view, Packed<T>& own, Backward<T>& back,
                            double* d_table) const {
    constexpr int64_t L = Vec<T>::L;
    const auto add_pulls = call_.is_rbf ? combine<T, true> : combine<T, false>;
    const int64_t window = window_of(*task.sequence), last = std::min(task.last, i + BLOCK);
    const Logits<T> how = logits_of(h);
    T *affinity = back.affinity, *logit = back.logit;
    T *pull = back.pull + SPARE * L, *weight = back.weight + SPARE * L;
    clear_spare(pull, window), clear_spare(weight, window);
    std::fill_n(back.d_query, BLOCK * padded_, T(0));
    double d_scale = 0;
    for (int64_t y = 0; i + y < last; y += L) {
      const int64_t place = i + y - task.first;
      const T *queries = back.query_rows + y * padded_, *keys = own.keys + place * padded_;
      const T* d_out = back.d_out_rows + y * value_padded_;
      const Upcoming upcoming = this->rows_after(task, b, h, i + y + BLOCK, d_out_view);
      diagonals(call_.is_rbf, queries, keys, padded_, window, &upcoming, own, affinity);
      logits_of_diagonals(how, task, place, own, affinity, logit);
      diagonals(false, d_out, own.values + place * value_padded_, value_padded_, window, nullptr,
                own, pull);
      const vec<T> highest = load(back.highest + y), share = load(back.share + y);
      const vec<T> less = load(back.less + y);
      const vec<T> least = load(back.threshold + y), end = load(back.last + y);
      vec<T> of_scale{};
      for (int64_t o = 0; o < window; ++o) {
        const vec<T> number = broadcast(T(o));
        const vec<T> p = weight_of(load(logit + o * L), number, highest, share, least, end);
        const vec<T> own_affinity = load(affinity + o * L);
        vec<T> d_logit = p * (load(pull + o * L) - less);
        store(weight + o * L, p);
        if (d_table) d_table[o] += double(sum(d_logit));
        d_logit = through_cap(how, own_affinity, d_logit);
        of_scale += d_logit * own_affinity;
        store(pull + o * L, d_logit * how.scale);
      }
      d_scale += double(sum(of_scale));
      for (int64_t r = 0; r < L; r += ROWS) {
        add_pulls(pull + r, OF_ROW<T>, OF_KEY<T>, keys + r * padded_, padded_, window + SPARE,
                  queries + r * padded_, back.d_query + (y + r) * padded_);
      }
      for (int64_t c = 0; c < L + window - 1; c += ROWS) {
        const int64_t from = std::max<int64_t>(0, c - window + 1);
        const int64_t count = std::min(L, c + ROWS) - from, first = (c - from) * L + from;
        T* d_values = back.d_values + (place + c) * value_padded_;
        add_pulls(pull + first, OF_KEY<T>, OF_ROW<T>, queries + from * padded_, padded_, count,
                  keys + c * padded_, back.d_keys + (place + c) * padded_);
        combine<T, false>(weight + first, OF_KEY<T>, OF_ROW<T>, d_out + from * value_padded_,
                          value_padded_, count, d_values, d_values);
      }
    }
    return d_scale;
  }

  // Weights of a tile, and what their gradients pull queries and keys with.
  double backward_tile(bool whole, const Task& task, int64_t h, int64_t i, int64_t y, int64_t j, int64_t x,
                       Packed<T>& own, Backward<T>& back, bool of_table) const {
    constexpr int L = Vec<T>::L;
    const int64_t width = call_.width, value_width = call_.value_width;
    const int64_t place = y * BLOCK + x;
    const Logits<T> how = logits_of(h);
    T *affinity = back.affinity + place, *logit = back.logit + place;
    T *pull = back.pull + place, *weight = back.weight + place;
    tile(call_.is_rbf, whole, back.query + y * width, own.keys, task, j, width, affinity, BLOCK);
    logits_of_tile(whole, how, task, i, j, own, affinity, logit, BLOCK);
    tile(false, whole, back.d_out + y * value_width, back.value_columns, task, j, value_width, pull,
                BLOCK);
    const int vectors = whole ? KEY_VECTORS : 1;
    double d_scale = 0;
    for (int r = 0; r < QUERIES; ++r) {
      const vec<T> highest = broadcast(back.highest[y + r]), share = broadcast(back.share[y + r]);
      const vec<T> less = broadcast(back.less[y + r]);
      const vec<T> least = broadcast(back.threshold[y + r]), last = broadcast(back.last[y + r]);
      vec<T> of_scale{};
      for (int v = 0; v < vectors; ++v) {
        const int64_t e = r * BLOCK + v * L;
        const vec<T> own_logit = load(logit + e), own_affinity = load(affinity + e);
        const vec<T> number = lane_numbers<T>() + T(j - (i + r - task.sequence->before) + v * L);
        const vec<T> p = weight_of(own_logit, number, highest, share, least, last);
        vec<T> d_logit = p * (load(pull + e) - less);
        store(weight + e, p);
        if (of_table) {
          T* to = back.d_table + MARGIN + task.sequence->before + j - i - r + v * L;
          store(to, load(to) + d_logit);
        }
        d_logit = through_cap(how, own_affinity, d_logit);
        of_scale += d_logit * own_affinity;
        store(pull + e, d_logit * how.scale);
      }
      d_scale += double(sum(of_scale));
    }
    return d_scale;
  }

  // d_query += pull keys, of a block of weights.
  void pull_queries(const Task& task, int64_t i, int64_t last, int64_t j, Backward<T>& back) const {
    const auto add_pulls = call_.is_rbf ? combine<T, true> : combine<T, false>;
    const Sequence& s = *task.sequence;
    for (int64_t r = i; r < last; r += ROWS) {
      const int64_t from = std::max({j, task.low, r - s.before});
      const int64_t end = std::min({j + BLOCK, task.high, r + ROWS + s.after});
      if (from >= end) continue;
      add_pulls(back.pull + (r - i) * BLOCK + (from - j), BLOCK, 1,
                back.key_rows + (from - task.begin) * padded_, padded_, end - from,
                back.query_rows + (r - i) * padded_, back.d_query + (r - i) * padded_);
    }
  }

  // d_keys += pull' queries and d_values += weight' d_out, of a block of weights.
  void pull_keys(const Task& task, int64_t i, int64_t last, int64_t j, int64_t end,
                 Backward<T>& back) const {
    const auto add_pulls = call_.is_rbf ? combine<T, true> : combine<T, false>;
    const Sequence& s = *task.sequence;
    for (int64_t k = j; k < end; k += ROWS) {
      const int64_t from = std::max(i, k - s.after);
      const int64_t count = std::min(last, k + ROWS + s.before) - from;
      if (count <= 0) continue;
      const int64_t place = (from - i) * BLOCK + (k - j), key = k - task.begin;
      add_pulls(back.pull + place, 1, BLOCK, back.query_rows + (from - i) * padded_, padded_,
                count, back.key_rows + key * padded_, back.d_keys + key * padded_);
      T* d_values = back.d_values + key * value_padded_;
      combine<T, false>(back.weight + place, 1, BLOCK,
                        back.d_out_rows + (from - i) * value_padded_, value_padded_, count,
                        d_values, d_values);
    }
  }

  // A task's own keys get their gradients, later ones wait in the halo.
  void put_gradients(const Task& task, int64_t b, int64_t g, const BandsGradients& wanted,
                     const Backward<T>& back, T* halo) const {
    const Sequence& s = *task.sequence;
    for (int64_t j = task.own_low; j < task.own_high; ++j) {
      T* d_key = at<T>(wanted.d_key, b, s.source + j * s.step, g);
      T* d_value = at<T>(wanted.d_value, b, s.source + j * s.step, g);
      const bool seen = j >= task.low && j < task.high;
      put_row(seen ? back.d_keys + (j - task.begin) * padded_ : nullptr, call_.width, d_key,
              call_.width);
      put_row(seen ? back.d_values + (j - task.begin) * value_padded_ : nullptr,
              call_.value_width, d_value, call_.value_width);
    }
    const int64_t from = std::max(task.own_high, task.low);
    for (int64_t j = from; j < task.high; ++j) {
      T* to = halo + (j - from) * room();
      const int64_t y = j - task.begin;
      put_row(back.d_keys + y * padded_, call_.width, to, call_.width);
      put_row(back.d_values + y * value_padded_, call_.value_width, to + call_.width,
              call_.value_width);
    }
  }
};

template <class T>
int threads_for(const BandsCall& call, const Plan<T>& plan, int64_t tasks) {
  const double rows = double(call.batch * call.heads) * plan.pairs;
  const double operations = rows * double(call.width + call.value_width);
  return worker_count(tasks, threads_worth(operations, static_cast<int>(call.threads)));
}

template <class T>
void forward(const BandsCall& call) {
  const Plan<T> plan(call, false);
  Bands<T> bands(call, plan);
  const int64_t rows = call.batch * call.targets * call.heads;
  huge(call.out.data, bytes_of<T>(call.out, rows * call.value_width));
  const int64_t groups = call.batch * call.kv_heads, tasks = groups * plan.tasks.size();
  const int threads = threads_for(call, plan, tasks);
  Pieces<T> size{nullptr};
  Packed<T>(size, call, plan);
  Buffer<T> memory(size.used * threads);
  parallel_tasks(tasks, threads, [&](int64_t n, int worker) {
    Pieces<T> pieces{memory.data() + worker * size.used};
    Packed<T> own(pieces, call, plan);
    BandRow<T> exact(call);
    const Place place(n, plan.tasks.size(), call.kv_heads);
    bands.forward(plan.tasks[place.task], place.sample, place.head, own, exact);
  });
}

// Rows that were left out of the tiles, in order; what they add to is their key head's alone.
template <class T>
void backward_of_rows(const BandsCall& call, const Plan<T>& plan, const BandsGradients& wanted,
                      const uint8_t* special, int threads) {
  const int64_t repeats = call.heads / call.kv_heads;
  const int64_t entries = wanted.d_table ? call.offsets : 0;
  Buffer<double> sums(call.batch * call.heads * (entries + 1));
  std::fill_n(sums.data(), call.batch * call.heads * (entries + 1), 0.0);
  parallel_tasks(call.batch * call.kv_heads, threads, [&](int64_t of, int) {
    const int64_t b = of / call.kv_heads, g = of % call.kv_heads;
    BandRow<T> exact(call);
    for (const Task& task : plan.tasks) {
      const Sequence& s = *task.sequence;
      for (int64_t i = task.first; i < task.last; ++i) {
        for (int64_t h = g * repeats; h < (g + 1) * repeats; ++h) {
          const int64_t row = b * call.heads + h;
          if (!special[row * call.targets + s.target + i * s.step]) continue;
          double* own = sums.data() + row * (entries + 1);
          exact.backward(wanted, b, s, i, h, own[entries],
                         entries ? own + call.origin : nullptr);
        }
      }
    }
  });
  for (int64_t row = 0; row < call.batch * call.heads; ++row) {
    const double* own = sums.data() + row * (entries + 1);
    const int64_t h = row % call.heads;
    wanted.d_scale[h] += own[entries];
    for (int64_t e = 0; e < entries; ++e) wanted.d_table[e * call.heads + h] += own[e];
  }
}

// What tasks first .. last - 1 have found for scales and the table, in their order.
template <class T>
void add_up(const BandsCall& call, const Plan<T>& plan, const BandsGradients& wanted, int64_t first,
            int64_t last, const double* d_scale, const double* d_table) {
  const int64_t repeats = call.heads / call.kv_heads;
  for (int64_t n = first; n < last; ++n) {
    const Place place(n, plan.tasks.size(), call.kv_heads);
    const Sequence& s = *plan.tasks[place.task].sequence;
    for (int64_t r = 0; r < repeats; ++r) {
      const int64_t h = place.head * repeats + r, own_place = (n - first) * repeats + r;
      wanted.d_scale[h] += d_scale[own_place];
      if (!wanted.d_table) continue;
      const double* own = d_table + own_place * plan.window;
      for (int64_t e = 0; e < s.before + s.after + 1; ++e) {
        const int64_t entry = call.origin - s.before + e;
        if (entry < 0 || entry >= call.offsets) continue;
        wanted.d_table[entry * call.heads + h] += own[e];
      }
    }
  }
}

template <class T>
void backward(const BandsCall& call, const BandsGradients& wanted) {
  const Plan<T> plan(call, true);
  BandsBackward<T> bands(call, plan);
  const int64_t H = call.heads, repeats = H / call.kv_heads;
  huge(wanted.d_query.data,
       bytes_of<T>(wanted.d_query, call.batch * call.targets * H * call.width));
  huge(wanted.d_key.data, call.batch * call.sources * call.kv_heads * call.width * sizeof(T));
  huge(wanted.d_value.data,
       call.batch * call.sources * call.kv_heads * call.value_width * sizeof(T));
  const int64_t groups = call.batch * call.kv_heads, per_group = plan.tasks.size();
  const int64_t tasks = groups * per_group, halo = plan.halo * bands.room();
  const int threads = threads_for(call, plan, tasks);
  Pieces<T> size{nullptr};
  Packed<T>(size, call, plan);
  Backward<T>(size, call, plan);
  Buffer<T> memory(size.used * threads), halos(halo * groups);
  huge(halos.data(), halo * groups * sizeof(T));
  // Every task adds to a table of its own; of long ones there are few at a time.
  const int64_t entries = wanted.d_table ? repeats * plan.window : 0;
  const int64_t at_once = std::max<int64_t>(MOST_ENTRIES / std::max<int64_t>(entries, 1), threads);
  const int64_t most = std::min(tasks, at_once);
  std::vector<double> d_scale(static_cast<size_t>(most * repeats));
  std::vector<double> d_table(static_cast<size_t>(most * entries));
  std::vector<uint8_t> special(static_cast<size_t>(call.batch * H * call.targets), 0);
  std::atomic<bool> any_special{false};
  for (int64_t first = 0; first < tasks; first += most) {
    const int64_t last = std::min(tasks, first + most);
    std::fill(d_scale.begin(), d_scale.end(), 0.0);
    std::fill(d_table.begin(), d_table.end(), 0.0);
    parallel_tasks(last - first, threads, [&](int64_t n, int worker) {
      Pieces<T> pieces{memory.data() + worker * size.used};
      Packed<T> own(pieces, call, plan);
      Backward<T> back(pieces, call, plan);
      const Place place(first + n, per_group, call.kv_heads);
      const Task& task = plan.tasks[place.task];
      double* table = wanted.d_table ? d_table.data() + n * entries : nullptr;
      bands.backward(task, place.sample, place.head, wanted, own, back,
                     d_scale.data() + n * repeats, table,
                     halos.data() + place.group * halo + task.halo * bands.room(), special.data(),
                     any_special);
    });
    add_up(call, plan, wanted, first, last, d_scale.data(), d_table.data());
  }
  if (plan.halo > 0) {
    parallel_tasks(tasks, threads, [&](int64_t n, int) {
      const Place place(n, per_group, call.kv_heads);
      bands.add_halos(place.task, place.sample, place.head, wanted,
                      halos.data() + place.group * halo);
    });
  }
  if (any_special) backward_of_rows<T>(call, plan, wanted, special.data(), threads);
}

template <class T>
void run(const BandsCall& call, const BandsGradients* wanted) {
  wanted ? backward<T>(call, *wanted) : forward<T>(call);
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_attention_bands(const graphattn::BandsCall* call,
                                                const graphattn::BandsGradients* wanted,
                                                int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::run<double>(*call, wanted) : graphattn::run<float>(*call, wanted);
  });
}
