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
// Tiles hold zeros in place of tokens with NaN, infinity or enormous numbers. Rows that see one are
// computed by themselves, in double precision (band_rows.h), and so are rows for which float has too
// few digits: nearly a tie in top-k, or RBF logits that are all far below zero.

#include "bands.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "band_rows.h"
#include "band_tiles.h"
#include "features.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t MOST_TARGETS = 1024, LEAST_TARGETS = 128;  // of a task

constexpr int64_t MOST_ENTRIES = 1 << 22;  // of tables that tasks add to at a time: 32 MB

// Tokens of one head lie far apart in memory: so many ahead they are fetched.
constexpr int64_t AHEAD = 12;

// What is wrong with a token of a task.
constexpr uint8_t BAD_KEY = 1, BAD_VALUE = 2;

// RBF logits below it have lost digits that weights would need: 1e-5 of them, where rounding adds up.
constexpr double STEEP = -32;
constexpr double FADED = 20;  // logits so far below the largest weigh less than rounding does

// In front of and behind a table: tiles read some entries that belong to no edge.
constexpr int64_t MARGIN = 2 * BLOCK;

GRAPHATTN_INLINE int64_t rounded_up(int64_t x, int64_t step) {
  return (x + step - 1) / step * step;
}

// Targets first .. last - 1 of a sequence, and the keys low .. high - 1 that they see, of which
// those up to own_high are nobody else's or are added to by later tasks.
struct Task {
  const Sequence* sequence;
  int64_t first, last, low, high, begin, keys;  // packed are `keys` from `begin`, in whole blocks
  int64_t own_low, own_high, halo;              // where its part of the halos begins, in keys
};

// A backward keeps gradients for all keys that its tasks share: with long windows, tasks are longer.
int64_t targets_of_task(const Sequence& s, bool is_backward) {
  const int64_t window = is_backward ? std::min(s.before + s.after + 1, s.sources) : 0;
  const int64_t few = std::clamp(rounded_up(s.targets / 4, BLOCK), LEAST_TARGETS, MOST_TARGETS);
  return std::max(few, rounded_up(window / 2, BLOCK));
}

// All tasks of one sample and key head, and the most that one of them needs.
struct Plan {
  std::vector<Task> tasks;
  int64_t keys = 0, row = 0, halo = 0, window = 0;
  double pairs = 0;

  Plan(const BandsCall& call, bool is_backward) {
    for (int64_t n = 0; n < call.count; ++n) add(call.sequences[n], is_backward);
  }

 private:
  void add(const Sequence& s, bool is_backward) {
    const int64_t size = targets_of_task(s, is_backward);
    const auto low_of = [&](int64_t first) {
      return std::clamp<int64_t>(first - s.before, 0, s.sources);
    };
    const int64_t seen = std::max<int64_t>(0, std::min(s.before + s.after + 1, s.sources));
    pairs += double(s.targets) * double(seen);
    window = std::max(window, std::max<int64_t>(0, s.before + s.after + 1));
    row = std::max(row, seen + QUERIES + 4 * BLOCK);
    for (int64_t first = 0; first < std::max<int64_t>(s.targets, 1); first += size) {
      Task t;
      t.sequence = &s, t.first = first, t.last = std::min(s.targets, first + size);
      t.low = low_of(first), t.high = std::clamp(t.last + s.after, t.low, s.sources);
      t.begin = t.low / BLOCK * BLOCK, t.keys = rounded_up(t.high - t.begin, BLOCK);
      t.own_low = first == 0 ? 0 : t.low;
      t.own_high = t.last == s.targets ? s.sources : low_of(t.last);
      t.halo = halo;
      halo += std::max<int64_t>(0, t.high - std::max(t.own_high, t.low));
      keys = std::max(keys, t.keys);
      tasks.push_back(t);
    }
  }
};

// Which sample, key head and task the n-th of a call is. Key heads of the same tokens follow each
// other: they lie in the same pages of memory, and next to each other.
struct Place {
  int64_t sample, task, head, group;  // group: sample and head

  Place(int64_t n, int64_t tasks, int64_t kv_heads)
      : sample(n / (tasks * kv_heads)), task(n / kv_heads % tasks), head(n % kv_heads),
        group(sample * kv_heads + head) {}
};

// Hands out pieces of a worker's memory, each aligned as a vector is. Without memory it counts.
template <class T>
struct Pieces {
  T* memory;
  int64_t used = 0;

  T* take(int64_t count) {
    T* piece = memory ? memory + used : nullptr;
    used += rounded_up(count, 64 / static_cast<int64_t>(sizeof(T)));
    return piece;
  }
};

// What a worker has packed: keys and values of a task, queries of a few targets.
template <class T>
struct Packed {
  T *keys, *values, *usable, *lengths, *query, *logits, *sums;
  Ordered<T>* order;
  uint8_t* bad;
  bool any_bad = false;

  Packed(Pieces<T>& from, const BandsCall& call, const Plan& plan) {
    keys = from.take(plan.keys * call.width);
    values = from.take(plan.keys * whole_vectors<T>(call.value_width));
    usable = from.take(plan.keys), lengths = from.take(plan.keys);
    query = from.take(QUERIES * call.width);
    logits = from.take(QUERIES * plan.row);
    sums = from.take(QUERIES * whole_vectors<T>(call.value_width));
    order = reinterpret_cast<Ordered<T>*>(from.take(plan.row));
    bad = reinterpret_cast<uint8_t*>(from.take(plan.keys));
  }
};

// What a worker has beside that in the backward: the task's keys in rows and values in columns,
// the gradients of both, and a block of targets and of weights.
template <class T>
struct Backward {
  T *key_rows, *value_columns, *d_keys, *d_values;
  T *query, *query_rows, *d_out, *d_out_rows, *d_query;
  T *affinity, *logit, *pull, *weight;            // [BLOCK, BLOCK]
  T *highest, *share, *threshold, *last, *less;  // [BLOCK]
  T* d_table;                                     // [window], with margins

  Backward(Pieces<T>& from, const BandsCall& call, const Plan& plan) {
    const int64_t P = whole_vectors<T>(call.width), V = whole_vectors<T>(call.value_width);
    key_rows = from.take(plan.keys * P), d_keys = from.take(plan.keys * P);
    value_columns = from.take(plan.keys * call.value_width);
    d_values = from.take(plan.keys * V);
    query = from.take(BLOCK * call.width), d_out = from.take(BLOCK * call.value_width);
    query_rows = from.take(BLOCK * P), d_query = from.take(BLOCK * P);
    d_out_rows = from.take(BLOCK * V);
    for (T** block : {&affinity, &logit, &pull, &weight}) *block = from.take(BLOCK * BLOCK);
    for (T** row : {&highest, &share, &threshold, &last, &less}) *row = from.take(BLOCK);
    d_table = from.take(call.table ? plan.window + 2 * MARGIN : 0);
  }
};

template <class T, bool RBF>
class Bands {
 public:
  static constexpr T NONE = -std::numeric_limits<T>::infinity();
  static constexpr T MOST = std::numeric_limits<T>::infinity();

  Bands(const BandsCall& call, const Plan& plan)
      : call_(call), plan_(plan), scale_(static_cast<const T*>(call.scale)),
        repeats_(call.heads / call.kv_heads), padded_(whole_vectors<T>(call.width)),
        value_padded_(whole_vectors<T>(call.value_width)), numbers_(call.top_k > 0 ? 4 : 2) {
    for (int64_t h = 0; h < call.heads; ++h) {
      const T strength = std::max(std::abs(scale_[h]), T(1));
      limits_.push_back(std::sqrt(std::numeric_limits<T>::max() / strength) / T(1e3));
    }
    if (call.table) pad_table();
  }

  void forward(const Task& task, int64_t b, int64_t g, Packed<T>& own, BandRow<T, RBF>& exact) {
    pack_keys(task, b, g, own, nullptr);
    for (int64_t h = g * repeats_; h < (g + 1) * repeats_; ++h) {
      for (int64_t i = task.first; i < task.last; i += QUERIES) {
        forward_few(task, b, h, i, own, exact);
      }
    }
  }

  // d_scale: [repeats] of this task; d_table: [repeats, window]; halo: of this task.
  void backward(const Task& task, int64_t b, int64_t g, const BandsGradients& wanted,
                Packed<T>& own, Backward<T>& back, double* d_scale, double* d_table, T* halo,
                uint8_t* special, std::atomic<bool>& any_special) {
    pack_keys(task, b, g, own, &back);
    std::fill_n(back.d_keys, task.keys * padded_, T(0));
    std::fill_n(back.d_values, task.keys * value_padded_, T(0));
    for (int64_t r = 0; r < repeats_; ++r) {
      const int64_t h = g * repeats_ + r;
      double* table = d_table ? d_table + r * plan_.window : nullptr;
      for (int64_t i = task.first; i < task.last; i += BLOCK) {
        if (pack_targets(task, b, h, i, wanted, back, special)) any_special = true;
        d_scale[r] += backward_block(task, h, i, own, back, table);
        const int64_t count = std::min(BLOCK, task.last - i);
        for (int64_t y = 0; y < count; ++y) {
          T* to = at<T>(wanted.d_query, b, token_of(task, i + y), h);
          put_row(back.d_query + y * padded_, call_.width, to, call_.width);
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
  int64_t token_of(const Task& task, int64_t i) const {
    return task.sequence->target + i * task.sequence->step;
  }

  T* kept_of(int64_t b, int64_t target, int64_t h) const {
    return static_cast<T*>(call_.kept) +
           ((b * call_.targets + target) * call_.heads + h) * numbers_;
  }

  bool is_valid_target(int64_t b, int64_t target) const {
    return !call_.valid_targets || call_.valid_targets[b * call_.targets + target];
  }

  // The table head by head, with zeros at both ends and in place of what is not sound.
  void pad_table() {
    const int64_t stride = call_.offsets + 2 * MARGIN;
    const T* table = static_cast<const T*>(call_.table);
    table_.assign(static_cast<size_t>(call_.heads * stride), T(0));
    bad_entries_.assign(static_cast<size_t>(call_.offsets), 0);
    for (int64_t h = 0; h < call_.heads; ++h) {
      for (int64_t e = 0; e < call_.offsets; ++e) {
        const T entry = table[e * call_.heads + h];
        const bool sound = std::abs(entry) <= limits_[h] || entry == NONE;
        if (sound) table_[h * stride + MARGIN + e] = entry;
        if (!sound) bad_entries_[e] = any_bad_entry_ = true;
      }
    }
  }

  Logits<T> logits_of(int64_t h) const {
    const int64_t stride = call_.offsets + 2 * MARGIN;
    const T* table = call_.table ? table_.data() + h * stride + MARGIN + call_.origin : nullptr;
    return {scale_[h], T(call_.softcap), table};
  }

  T limit_of_group(int64_t g) const {
    const auto begin = limits_.begin() + g * repeats_;
    return *std::min_element(begin, begin + repeats_);
  }

  void pack_keys(const Task& task, int64_t b, int64_t g, Packed<T>& own, Backward<T>* back) const {
    constexpr int64_t L = Vec<T>::L, K = KEYS<T>;
    const T limit = limit_of_group(g);
    own.any_bad = any_bad_entry_;
    const T *keys[L], *values[L];
    for (int64_t first = 0; first < task.keys; first += L) {
      for (int64_t n = 0; n < L; ++n) {
        find_key(task, b, g, first + n, limit, own, keys[n], values[n]);
        if (back) {
          put_row(keys[n], call_.width, back->key_rows + (first + n) * padded_, padded_);
        } else {
          put_row(values[n], call_.value_width, own.values + (first + n) * value_padded_,
                  value_padded_);
        }
      }
      const int64_t tile = first / K * K, lane = first % K;
      put_columns<T, L>(keys, call_.width, own.keys + tile * call_.width + lane, K);
      if (back) {
        put_columns<T, L>(values, call_.value_width,
                          back->value_columns + tile * call_.value_width + lane, K);
      }
    }
  }

  // Key and value at a place of a task, or null where tiles hold zeros; marks what is bad.
  void find_key(const Task& task, int64_t b, int64_t g, int64_t y, T limit, Packed<T>& own,
                const T*& key, const T*& value) const {
    const Sequence& s = *task.sequence;
    const int64_t j = task.begin + y, token = s.source + j * s.step;
    const uint8_t* valid = call_.valid_sources;
    const bool exists = j >= task.low && j < task.high;
    const bool usable = exists && (!valid || valid[b * call_.sources + token]);
    own.usable[y] = usable ? T(0) : NONE;
    own.lengths[y] = 0;
    own.bad[y] = 0;
    key = value = nullptr;
    if (!usable) return;
    const int64_t next = s.source + std::min(j + AHEAD, task.high - 1) * s.step;
    prefetch(at<T>(call_.key, b, next, g), call_.width * sizeof(T));
    prefetch(at<T>(call_.value, b, next, g), call_.value_width * sizeof(T));
    key = at<const T>(call_.key, b, token, g);
    value = at<const T>(call_.value, b, token, g);
    if (!is_sound(key, call_.width, limit)) own.bad[y] |= BAD_KEY, key = nullptr;
    if (!is_sound(value, call_.value_width, limit)) own.bad[y] |= BAD_VALUE, value = nullptr;
    if (needs_lengths() && key) own.lengths[y] = length_of(key);
    own.any_bad = own.any_bad || own.bad[y];
  }

  // Whether target i has an edge to a token with something bad, or reads a bad entry of the table.
  bool sees_bad(const Task& task, int64_t i, uint8_t what, const Packed<T>& own,
                const T* logits = nullptr, int64_t from = 0) const {
    const Sequence& s = *task.sequence;
    if (!own.any_bad) return false;
    const int64_t end = std::min(task.high, i + s.after + 1);
    for (int64_t j = std::max(task.low, i - s.before); j < end; ++j) {
      if (s.loops != 1 && j - i == -s.loops / 2) continue;
      if (own.usable[j - task.begin] == NONE) continue;
      if (logits && logits[j - from] == NONE) continue;
      if (own.bad[j - task.begin] & what) return true;
      if (any_bad_entry_ && bad_entries_[call_.origin + j - i]) return true;
    }
    return false;
  }

  // Affinities of QUERIES targets and a tile of packed keys that begins with j, or a vector of it.
  template <bool RADIAL>
  void tile(bool whole, const T* query, const T* packed, const Task& task, int64_t j,
            int64_t width, T* to, int64_t stride) const {
    const int64_t y = j - task.begin, lane = y % KEYS<T>;
    const T* keys = packed + (y - lane) * width + lane;
    if (whole) {
      affinities<T, RADIAL, KEY_VECTORS>(query, keys, width, to, stride);
    } else {
      affinities<T, RADIAL, 1>(query, keys, width, to, stride);
    }
  }

  void logits_of_tile(bool whole, const Logits<T>& how, const Task& task, int64_t i, int64_t j,
                      const Packed<T>& own, const T* from, T* to, int64_t stride) const {
    const T* usable = own.usable + (j - task.begin);
    if (whole) {
      make_logits<T, KEY_VECTORS>(how, seen_by(task, i, j, KEYS<T>), j - i, usable, from, to,
                                  stride);
    } else {
      make_logits<T, 1>(how, seen_by(task, i, j, Vec<T>::L), j - i, usable, from, to, stride);
    }
  }

  // Of which keys j .. j + keys - 1 targets i .. i + QUERIES - 1 see.
  Seen seen_by(const Task& task, int64_t i, int64_t j, int64_t keys) const {
    const Sequence& s = *task.sequence;
    Seen seen{i - s.before - j, i + s.after + 1 - j, s.sources - j, i - s.loops / 2 - j, false};
    if (s.loops == 1) seen.hole = -MARGIN;
    const bool whole = seen.hole + QUERIES <= 0 || seen.hole >= keys;
    seen.all = whole && seen.first + QUERIES - 1 <= 0 && std::min(seen.last, seen.end) >= keys;
    return seen;
  }

  // Targets i .. i + QUERIES - 1 of one head.
  void forward_few(const Task& task, int64_t b, int64_t h, int64_t i, Packed<T>& own,
                   BandRow<T, RBF>& exact) const {
    constexpr int64_t K = KEYS<T>, L = Vec<T>::L;
    const Sequence& s = *task.sequence;
    bool special[QUERIES] = {};
    const int64_t count = std::min<int64_t>(QUERIES, task.last - i);
    for (int64_t next = i + QUERIES; next < std::min(i + 2 * QUERIES, task.last); ++next) {
      prefetch(at<T>(call_.query, b, token_of(task, next), h), call_.width * sizeof(T));
      prefetch(at<T>(call_.out, b, token_of(task, next), h), call_.value_width * sizeof(T));
    }
    const T* queries[QUERIES];
    for (int64_t r = 0; r < QUERIES; ++r) {
      const T*& query = queries[r] = nullptr;
      if (r < count && is_valid_target(b, token_of(task, i + r))) {
        query = at<const T>(call_.query, b, token_of(task, i + r), h);
        if (!is_sound(query, call_.width, limits_[h])) special[r] = true, query = nullptr;
        const uint8_t what = call_.top_k > 0 ? BAD_KEY : BAD_KEY | BAD_VALUE;
        special[r] = special[r] || sees_bad(task, i + r, what, own);
      }
    }
    put_columns<T, QUERIES>(queries, call_.width, own.query, QUERIES);
    const int64_t from = std::max(task.low, i - s.before);
    const int64_t end = std::max(from, std::min(task.high, i + QUERIES + s.after));
    const int64_t start = from / L * L, row = rounded_up(end - start, L), stride = plan_.row;
    const Logits<T> how = logits_of(h);
    for (int64_t j = start; j < end;) {
      const bool whole = j % K == 0 && j + L < end;
      T* to = own.logits + (j - start);
      tile<RBF>(whole, own.query, own.keys, task, j, call_.width, to, stride);
      logits_of_tile(whole, how, task, i, j, own, to, to, stride);
      j += whole ? K : L;
    }
    T share[QUERIES];
    for (int64_t r = 0; r < count; ++r) {
      T* logits = own.logits + r * stride;
      const int64_t target = token_of(task, i + r);
      T* kept = kept_of(b, target, h);
      const T* table = how.table ? how.table + start - (i + r) : nullptr;
      bool careful = false;
      if (call_.top_k > 0) {
        const Largest<T> best = find_largest(logits, row, call_.top_k, own.order);
        careful = is_nearly_a_tie(best, logits, row, table, task, i + r, r, h, own);
        keep_largest(best, logits, row, start - (i + r - s.before), kept);
        special[r] = special[r] || (is_valid_target(b, target) &&
                                    sees_bad(task, i + r, BAD_VALUE, own, logits, start));
      }
      T* lse = static_cast<T*>(call_.lse) + (b * call_.targets + target) * call_.heads + h;
      careful = careful || (end > from && is_steep(logits, row, table));
      *lse = end > from ? exponentials(logits, row, kept) : NONE;
      if (*lse == NONE || !is_valid_target(b, target)) kept[0] = MOST, kept[1] = 0, *lse = NONE;
      share[r] = kept[1];
      special[r] = special[r] || (careful && *lse != NONE);
      if (special[r]) kept[0] = MOST, kept[1] = 1;
    }
    std::fill_n(own.sums, QUERIES * value_padded_, T(0));
    for (int64_t j = from; j < end; j += LONG_SUM) {
      for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t low = std::max(j, i + r - s.before);
        const int64_t high = std::min({j + LONG_SUM, end, i + r + ROWS + s.after});
        T* sums = own.sums + r * value_padded_;
        combine<T, false>(own.logits + r * stride + (low - start), stride, 1,
                          own.values + (low - task.begin) * value_padded_, value_padded_,
                          high - low, sums, sums);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      if (special[r]) {
        exact.forward(b, s, i + r, h);
        continue;
      }
      T* out = at<T>(call_.out, b, token_of(task, i + r), h);
      const T* sums = own.sums + r * value_padded_;
      for (int64_t d = 0; d < call_.value_width; ++d) {
        out[d] = share[r] == 0 ? T(0) : sums[d] * share[r];
      }
    }
  }

  // -inf in place of all but the largest; what the backward needs to find them again.
  void keep_largest(const Largest<T>& best, T* logits, int64_t count, int64_t place,
                    T* kept) const {
    const vec<T> least = broadcast(best.threshold);
    const vec<T> last = broadcast(T(std::min(best.last, count)));
    for (int64_t e = 0; e < count; e += Vec<T>::L) {
      const vec<T> logit = load(logits + e), number = lane_numbers<T>() + T(e);
      const auto is_kept = (logit > least) | ((logit == least) & (number <= last));
      store(logits + e, is_kept ? logit : broadcast(NONE));
    }
    kept[2] = best.threshold;
    // Within the row's window, so that float32 can tell places apart.
    kept[3] = best.last < count ? T(best.last + place) : MOST;
  }

  // What rounding may add to a logit, in units of the terms it is summed up of.
  T rounding() const {
    return 2 * (std::sqrt(T(call_.width)) + 4) * std::numeric_limits<T>::epsilon();
  }

  // Differences are of one sign, and so the logit bounds its terms; products need lengths.
  bool needs_lengths() const { return sizeof(T) == sizeof(float) && !RBF && call_.top_k > 0; }

  T length_of(const T* x) const { return std::sqrt(dot<T, 0>(x, x, call_.width)); }

  // Whether rounding may have decided which is the last edge kept. (Double has no better judge.)
  bool is_nearly_a_tie(const Largest<T>& best, const T* logits, int64_t count, const T* table,
                       const Task& task, int64_t i, int64_t r, int64_t h,
                       const Packed<T>& own) const {
    if (sizeof(T) != sizeof(float) || best.next == NONE) return false;
    T terms = std::max(std::abs(best.threshold), std::abs(best.next));
    if (needs_lengths()) {
      T query = 0, key = 0;
      for (int64_t d = 0; d < call_.width; ++d) {
        query += own.query[d * QUERIES + r] * own.query[d * QUERIES + r];
      }
      const int64_t end = std::min(task.high, i + task.sequence->after + 1);
      for (int64_t j = std::max(task.low, i - task.sequence->before); j < end; ++j) {
        key = std::max(key, own.lengths[j - task.begin]);
      }
      terms += std::abs(scale_[h]) * std::sqrt(query) * key;
    } else if (table) {
      terms -= least_without(table, logits, count, NONE);
    }
    return !(best.threshold - best.next > rounding() * terms);
  }

  // The least of the logits above a limit, less what the table has added to them; at most 0.
  T least_without(const T* table, const T* logits, int64_t count, T limit) const {
    const vec<T> above = broadcast(limit), zero{};
    vec<T> least{};
    for (int64_t e = 0; e < count; e += Vec<T>::L) {
      const vec<T> logit = load(logits + e);
      least = minimum(least, logit > above ? logit - load(table + e) : zero);
    }
    return least_of(least);
  }

  // Whether edges that weigh something have RBF logits that rounding has changed. `table`: what was
  // added to the logits, or null.
  bool is_steep(const T* logits, int64_t count, const T* table) const {
    if (!RBF || sizeof(T) != sizeof(float)) return false;
    vec<T> most = broadcast(NONE);
    for (int64_t e = 0; e < count; e += Vec<T>::L) most = maximum(most, load(logits + e));
    const T highest = largest(most);
    if (!table) return highest < T(STEEP) && highest != NONE;
    return least_without(table, logits, count, highest - T(FADED)) < T(STEEP);
  }

  // exp(logit - largest) in place of logits; returns the log-sum. Keeps the largest and 1 / sum.
  T exponentials(T* logits, int64_t count, T* kept) const {
    constexpr int64_t L = Vec<T>::L;
    vec<T> most = broadcast(NONE);
    for (int64_t e = 0; e < count; e += L) most = maximum(most, load(logits + e));
    const T highest = largest(most);
    kept[0] = highest;
    if (highest == NONE) {
      std::fill_n(logits, count, T(0));
      return NONE;
    }
    double whole = 0;
    for (int64_t first = 0; first < count; first += LONG_SUM) {
      vec<T> part{};
      for (int64_t e = first; e < std::min(first + LONG_SUM, count); e += L) {
        const vec<T> exponential = exp(load(logits + e) - broadcast(highest));
        store(logits + e, exponential);
        part += exponential;
      }
      whole += sum(part);
    }
    kept[1] = T(1) / T(whole);
    return highest + std::log(T(whole));
  }

  // ---- Backward ----

  // Up to BLOCK targets of one head; marks those that are left to BandRow, returns whether one is.
  bool pack_targets(const Task& task, int64_t b, int64_t h, int64_t i,
                    const BandsGradients& wanted, Backward<T>& back, uint8_t* special) const {
    const int64_t width = call_.width, value_width = call_.value_width;
    const T* d_lse = static_cast<const T*>(wanted.d_lse);
    bool some = false;
    const T *queries[QUERIES], *upstreams[QUERIES];
    for (int64_t y = 0; y < BLOCK; ++y) {
      const T *&query = queries[y % QUERIES], *&d_out = upstreams[y % QUERIES];
      query = d_out = nullptr;
      back.highest[y] = MOST, back.share[y] = 0, back.less[y] = 0;
      back.threshold[y] = MOST, back.last[y] = 0;
      if (i + y < task.last) {
        const int64_t target = token_of(task, i + y);
        const int64_t next = token_of(task, std::min(i + y + AHEAD, task.last - 1));
        prefetch(at<T>(call_.query, b, next, h), width * sizeof(T));
        prefetch(at<T>(call_.out, b, next, h), value_width * sizeof(T));
        prefetch(at<T>(wanted.d_out, b, next, h), value_width * sizeof(T));
        const T* kept = kept_of(b, target, h);
        const T of_lse = d_lse ? d_lse[(b * call_.targets + target) * call_.heads + h] : T(0);
        const T* upstream = at<const T>(wanted.d_out, b, target, h);
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
          query = at<const T>(call_.query, b, target, h), d_out = upstream;
          back.highest[y] = kept[0], back.share[y] = kept[1];
          if (call_.top_k > 0) back.threshold[y] = kept[2], back.last[y] = kept[3];
          back.less[y] = dot<T, 0>(d_out, at<const T>(call_.out, b, target, h), value_width);
          back.less[y] -= of_lse;
        }
      }
      put_row(query, width, back.query_rows + y * padded_, padded_);
      put_row(d_out, value_width, back.d_out_rows + y * value_padded_, value_padded_);
      if ((y + 1) % QUERIES == 0) {
        const int64_t few = y + 1 - QUERIES;
        put_columns<T, QUERIES>(queries, width, back.query + few * width, QUERIES);
        put_columns<T, QUERIES>(upstreams, value_width, back.d_out + few * value_width, QUERIES);
      }
    }
    return some;
  }

  bool is_silent(const T* d_out, T d_lse) const {
    bool silent = d_lse == 0;
    for (int64_t d = 0; silent && d < call_.value_width; ++d) silent = d_out[d] == 0;
    return silent;
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

  // Weights of a tile, and what their gradients pull queries and keys with.
  double backward_tile(bool whole, const Task& task, int64_t h, int64_t i, int64_t y, int64_t j, int64_t x,
                       Packed<T>& own, Backward<T>& back, bool of_table) const {
    constexpr int L = Vec<T>::L;
    const int64_t width = call_.width, value_width = call_.value_width;
    const int64_t place = y * BLOCK + x;
    const Logits<T> how = logits_of(h);
    T *affinity = back.affinity + place, *logit = back.logit + place;
    T *pull = back.pull + place, *weight = back.weight + place;
    tile<RBF>(whole, back.query + y * width, own.keys, task, j, width, affinity, BLOCK);
    logits_of_tile(whole, how, task, i, j, own, affinity, logit, BLOCK);
    tile<false>(whole, back.d_out + y * value_width, back.value_columns, task, j, value_width, pull,
                BLOCK);
    const int vectors = whole ? KEY_VECTORS : 1;
    double d_scale = 0;
    for (int r = 0; r < QUERIES; ++r) {
      const vec<T> highest = broadcast(back.highest[y + r]), share = broadcast(back.share[y + r]);
      const vec<T> less = broadcast(back.less[y + r]);
      vec<T> of_scale{};
      for (int v = 0; v < vectors; ++v) {
        const int64_t e = r * BLOCK + v * L;
        const vec<T> own_logit = load(logit + e), own_affinity = load(affinity + e);
        vec<T> p = exp(own_logit - highest) * share;
        if (call_.top_k > 0) {
          const T first = T(j - (i + r - task.sequence->before) + v * L);
          const vec<T> number = lane_numbers<T>() + first;
          const vec<T> least = broadcast(back.threshold[y + r]);
          const vec<T> last = broadcast(back.last[y + r]);
          p = ((own_logit > least) | ((own_logit == least) & (number <= last))) ? p : vec<T>{};
        }
        vec<T> d_logit = p * (load(pull + e) - less);
        store(weight + e, p);
        if (of_table) {
          T* to = back.d_table + MARGIN + task.sequence->before + j - i - r + v * L;
          store(to, load(to) + d_logit);
        }
        if (how.cap > 0) {
          const vec<T> bounded = tanh(own_affinity * how.scale / how.cap);
          d_logit = d_logit * (T(1) - bounded * bounded);
        }
        of_scale += d_logit * own_affinity;
        store(pull + e, d_logit * how.scale);
      }
      d_scale += double(sum(of_scale));
    }
    return d_scale;
  }

  // d_query += pull keys, of a block of weights.
  void pull_queries(const Task& task, int64_t i, int64_t last, int64_t j, Backward<T>& back) const {
    const Sequence& s = *task.sequence;
    for (int64_t r = i; r < last; r += ROWS) {
      const int64_t from = std::max({j, task.low, r - s.before});
      const int64_t end = std::min({j + BLOCK, task.high, r + ROWS + s.after});
      if (from >= end) continue;
      combine<T, RBF>(back.pull + (r - i) * BLOCK + (from - j), BLOCK, 1,
                      back.key_rows + (from - task.begin) * padded_, padded_, end - from,
                      back.query_rows + (r - i) * padded_, back.d_query + (r - i) * padded_);
    }
  }

  // d_keys += pull' queries and d_values += weight' d_out, of a block of weights.
  void pull_keys(const Task& task, int64_t i, int64_t last, int64_t j, int64_t end,
                 Backward<T>& back) const {
    const Sequence& s = *task.sequence;
    for (int64_t k = j; k < end; k += ROWS) {
      const int64_t from = std::max(i, k - s.after);
      const int64_t count = std::min(last, k + ROWS + s.before) - from;
      if (count <= 0) continue;
      const int64_t place = (from - i) * BLOCK + (k - j), key = k - task.begin;
      combine<T, RBF>(back.pull + place, 1, BLOCK, back.query_rows + (from - i) * padded_, padded_,
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

  const BandsCall& call_;
  const Plan& plan_;
  const T* scale_;
  const int64_t repeats_, padded_, value_padded_, numbers_;  // numbers_: kept of a row
  std::vector<T> limits_, table_;
  std::vector<uint8_t> bad_entries_;
  bool any_bad_entry_ = false;
};

int threads_for(const BandsCall& call, const Plan& plan, int64_t tasks) {
  const double rows = double(call.batch * call.heads) * plan.pairs;
  const double operations = rows * double(call.width + call.value_width);
  return worker_count(tasks, threads_worth(operations, static_cast<int>(call.threads)));
}

template <class T, bool RBF>
void forward(const BandsCall& call) {
  const Plan plan(call, false);
  Bands<T, RBF> bands(call, plan);
  huge(call.out.data, call.batch * call.targets * call.heads * call.value_width * sizeof(T));
  const int64_t groups = call.batch * call.kv_heads, tasks = groups * plan.tasks.size();
  const int threads = threads_for(call, plan, tasks);
  Pieces<T> size{nullptr};
  Packed<T>(size, call, plan);
  Buffer<T> memory(size.used * threads);
  parallel_tasks(tasks, threads, [&](int64_t n, int worker) {
    Pieces<T> pieces{memory.data() + worker * size.used};
    Packed<T> own(pieces, call, plan);
    BandRow<T, RBF> exact(call);
    const Place place(n, plan.tasks.size(), call.kv_heads);
    bands.forward(plan.tasks[place.task], place.sample, place.head, own, exact);
  });
}

// Rows that were left out of the tiles, in order; what they add to is their key head's alone.
template <class T, bool RBF>
void backward_of_rows(const BandsCall& call, const Plan& plan, const BandsGradients& wanted,
                      const uint8_t* special, int threads) {
  const int64_t repeats = call.heads / call.kv_heads;
  const int64_t entries = wanted.d_table ? call.offsets : 0;
  Buffer<double> sums(call.batch * call.heads * (entries + 1));
  std::fill_n(sums.data(), call.batch * call.heads * (entries + 1), 0.0);
  parallel_tasks(call.batch * call.kv_heads, threads, [&](int64_t of, int) {
    const int64_t b = of / call.kv_heads, g = of % call.kv_heads;
    BandRow<T, RBF> exact(call);
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
void add_up(const BandsCall& call, const Plan& plan, const BandsGradients& wanted, int64_t first,
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

template <class T, bool RBF>
void backward(const BandsCall& call, const BandsGradients& wanted) {
  const Plan plan(call, true);
  Bands<T, RBF> bands(call, plan);
  const int64_t H = call.heads, repeats = H / call.kv_heads;
  huge(wanted.d_query.data, call.batch * call.targets * H * call.width * sizeof(T));
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
  if (any_special) backward_of_rows<T, RBF>(call, plan, wanted, special.data(), threads);
}

template <class T>
void run(const BandsCall& call, const BandsGradients* wanted) {
  if (wanted) {
    call.is_rbf ? backward<T, true>(call, *wanted) : backward<T, false>(call, *wanted);
  } else {
    call.is_rbf ? forward<T, true>(call) : forward<T, false>(call);
  }
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
