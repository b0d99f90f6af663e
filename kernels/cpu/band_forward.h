// The forward of attention over bands, and what the backward shares with it: packed tokens and the
// logits of tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "band_diagonals.h"
#include "band_plan.h"
#include "band_rows.h"
#include "band_tiles.h"
#include "band_top_k.h"
#include "bands.h"
#include "feature_sums.h"
#include "simd.h"

namespace graphattn {

// Tokens of one head lie far apart in memory: so many ahead they are fetched.
constexpr int64_t AHEAD = 12;

// What is wrong with a token of a task.
constexpr uint8_t BAD_KEY = 1, BAD_VALUE = 2;

// RBF logits below it have lost digits that weights would need: 1e-5 of them, where rounding adds up.
constexpr double STEEP = -32;
constexpr double FADED = 20;  // logits so far below the largest weigh less than rounding does

template <class T>
class Bands {
 public:
  static constexpr T NONE = -std::numeric_limits<T>::infinity();
  static constexpr T MOST = std::numeric_limits<T>::infinity();

  Bands(const BandsCall& call, const Plan<T>& plan)
      : call_(call), plan_(plan), scale_(static_cast<const T*>(call.scale)),
        repeats_(call.heads / call.kv_heads), padded_(whole_vectors<T>(call.width)),
        value_padded_(whole_vectors<T>(call.value_width)), numbers_(numbers_kept(call)) {
    for (int64_t h = 0; h < call.heads; ++h) {
      const T strength = std::max(std::abs(scale_[h]), T(1));
      limits_.push_back(std::sqrt(std::numeric_limits<T>::max() / strength) / T(1e3));
    }
    if (call.table) pad_table();
  }

  void forward(const Task& task, int64_t b, int64_t g, Packed<T>& own, BandRow<T>& exact) {
    if (!task.is_narrow) pack_keys(task, b, g, own, nullptr);
    int64_t keys = 0;
    for (int64_t h = g * repeats_; h < (g + 1) * repeats_; ++h) {
      for (int64_t i = task.first; i < task.last; i += task.is_narrow ? Vec<T>::L : QUERIES) {
        if (task.is_narrow) {
          pack_rows(task, b, g, keys_until(task, i), keys, own);
          forward_diagonals(task, b, h, i, own, exact);
        } else {
          forward_few(task, b, h, i, own, exact);
        }
      }
    }
  }

 protected:
  int64_t token_of(const Task& task, int64_t i) const {
    return task.sequence->target + i * task.sequence->step;
  }

  T* kept_of(int64_t b, int64_t target, int64_t h) const {
    return static_cast<T*>(call_.kept) +
           ((b * call_.targets + target) * call_.heads + h) * numbers_;
  }

  // Where the output of a row stands as it was computed, if that is anywhere.
  T* exact_output(int64_t b, int64_t target, int64_t h) const {
    if (call_.keeps_outputs) return kept_of(b, target, h) + numbers_ - call_.value_width;
    return at<T>(call_.out, b, target, h);
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

  // So many keys of a narrow window are packed where targets from i on are computed.
  int64_t keys_until(const Task& task, int64_t i) const {
    return i - task.first + Vec<T>::L + window_of(*task.sequence) - 1;
  }

  // Keys and values as rows: those from `packed` on, which is how many there are then.
  void pack_rows(const Task& task, int64_t b, int64_t g, int64_t count, int64_t& packed,
                 Packed<T>& own) const {
    const T limit = limit_of_group(g);
    if (packed == 0) own.any_bad = any_bad_entry_;
    const int64_t first = packed;
    orders<T> most{};
    const T *key, *value;
    for (; packed < count; ++packed) {
      look_up(task, b, g, packed, own, key, value);
      if (key) join_sizes(key, call_.width, most), join_sizes(value, call_.value_width, most);
      if (key && needs_lengths()) own.lengths[packed] = length_of(key);
      put_rows(packed, key, value, own);
    }
    // Nearly always all are sound, and one look says so.
    for (packed = is_sound(most, limit) ? count : first; packed < count; ++packed) {
      find_key(task, b, g, packed, limit, own, key, value);
      put_rows(packed, key, value, own);
    }
  }

  void put_rows(int64_t y, const T* key, const T* value, const Packed<T>& own) const {
    put_row(key, call_.width, own.keys + y * padded_, padded_);
    put_row(value, call_.value_width, own.values + y * value_padded_, value_padded_);
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

  // Key and value at a place of a task, or null where nothing can be seen.
  void look_up(const Task& task, int64_t b, int64_t g, int64_t y, Packed<T>& own, const T*& key,
               const T*& value) const {
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
    constexpr int64_t L = Vec<T>::L;
    key = read_head(call_.key, b, token, g, call_.width, own.room_of(y % L));
    value = read_head(call_.value, b, token, g, call_.value_width, own.room_of(L + y % L));
  }

  // The same, null also where tiles hold zeros; marks what is bad.
  void find_key(const Task& task, int64_t b, int64_t g, int64_t y, T limit, Packed<T>& own,
                const T*& key, const T*& value) const {
    look_up(task, b, g, y, own, key, value);
    if (!key) return;
    if (!task.is_narrow) {
      const Sequence& s = *task.sequence;
      const int64_t next = s.source + std::min(task.begin + y + AHEAD, task.high - 1) * s.step;
      fetch_head<T>(call_.key, b, next, g, call_.width);
      fetch_head<T>(call_.value, b, next, g, call_.value_width);
    }
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
  void tile(bool is_rbf, bool whole, const T* query, const T* packed, const Task& task, int64_t j,
            int64_t width, T* to, int64_t stride) const {
    const int64_t y = j - task.begin, lane = y % KEYS<T>;
    const T* keys = packed + (y - lane) * width + lane;
    if (is_rbf) {
      whole ? affinities<T, true, KEY_VECTORS>(query, keys, width, to, stride)
            : affinities<T, true, 1>(query, keys, width, to, stride);
    } else {
      whole ? affinities<T, false, KEY_VECTORS>(query, keys, width, to, stride)
            : affinities<T, false, 1>(query, keys, width, to, stride);
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

  // Queries of up to `few` targets from i on, null where there is none; marks those that are left to
  // BandRow.
  void read_queries(const Task& task, int64_t b, int64_t h, int64_t i, int64_t few,
                    const Packed<T>& own, const T** queries, bool* special) const {
    for (int64_t r = 0; r < few; ++r) {
      const T*& query = queries[r] = nullptr;
      special[r] = false;
      if (i + r >= task.last || !is_valid_target(b, token_of(task, i + r))) continue;
      query = read_head(call_.query, b, token_of(task, i + r), h, call_.width, own.room_of(r));
      if (!is_sound(query, call_.width, limits_[h])) special[r] = true, query = nullptr;
      const uint8_t what = call_.top_k > 0 ? BAD_KEY : BAD_KEY | BAD_VALUE;
      special[r] = special[r] || sees_bad(task, i + r, what, own);
    }
  }

  // Targets i .. i + QUERIES - 1 of one head.
  void forward_few(const Task& task, int64_t b, int64_t h, int64_t i, Packed<T>& own,
                   BandRow<T>& exact) const {
    constexpr int64_t K = KEYS<T>, L = Vec<T>::L;
    const Sequence& s = *task.sequence;
    bool special[QUERIES];
    const T* queries[QUERIES];
    const int64_t count = std::min<int64_t>(QUERIES, task.last - i);
    for (int64_t next = i + QUERIES; next < std::min(i + 2 * QUERIES, task.last); ++next) {
      fetch_head<T>(call_.query, b, token_of(task, next), h, call_.width);
      fetch_head<T>(call_.out, b, token_of(task, next), h, call_.value_width);
    }
    read_queries(task, b, h, i, QUERIES, own, queries, special);
    put_columns<T, QUERIES>(queries, call_.width, own.query, QUERIES);
    const int64_t from = std::max(task.low, i - s.before);
    const int64_t end = std::max(from, std::min(task.high, i + QUERIES + s.after));
    const int64_t start = from / L * L, row = rounded_up(end - start, L), stride = plan_.row;
    const Logits<T> how = logits_of(h);
    for (int64_t j = start; j < end;) {
      const bool whole = j % K == 0 && j + L < end;
      T* to = own.logits + (j - start);
      tile(call_.is_rbf, whole, own.query, own.keys, task, j, call_.width, to, stride);
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
    write_rows(task, b, h, i, count, special, share, own, exact);
  }

  // Queries of targets i .. i + L - 1 as rows; marks those that are left to BandRow.
  void pack_queries(const Task& task, int64_t b, int64_t h, int64_t i, const Packed<T>& own,
                    bool* special) const {
    constexpr int64_t L = Vec<T>::L;
    orders<T> most{};
    const T* queries[L];
    const auto put = [&] {
      for (int64_t r = 0; r < L; ++r) {
        if (queries[r]) join_sizes(queries[r], call_.width, most);
        put_row(queries[r], call_.width, own.query + r * padded_, padded_);
      }
    };
    for (int64_t r = 0; r < L; ++r) {
      const bool is_some = i + r < task.last && is_valid_target(b, token_of(task, i + r));
      queries[r] = nullptr, special[r] = false;
      if (!is_some) continue;
      queries[r] = read_head(call_.query, b, token_of(task, i + r), h, call_.width, own.room_of(r));
    }
    put();
    if (!own.any_bad && is_sound(most, limits_[h])) return;
    read_queries(task, b, h, i, L, own, queries, special);
    put();
  }

  // Targets i .. i + L - 1 of one head in a narrow window.
  void forward_diagonals(const Task& task, int64_t b, int64_t h, int64_t i, Packed<T>& own,
                         BandRow<T>& exact) const {
    constexpr int64_t L = Vec<T>::L;
    const Sequence& s = *task.sequence;
    const int64_t window = window_of(s), place = i - task.first;
    const int64_t count = std::min<int64_t>(L, task.last - i);
    bool special[L], careful[L] = {};
    pack_queries(task, b, h, i, own, special);
    T* logits = own.logits + SPARE * L;
    const Logits<T> how = logits_of(h);
    const Upcoming upcoming = rows_after(task, b, h, i + L, call_.out);
    diagonals(call_.is_rbf, own.query, own.keys + place * padded_, padded_, window, &upcoming, own,
              logits);
    logits_of_diagonals(how, task, place, own, logits, logits);
    const T* table = how.table ? how.table - s.before : nullptr;
    Kept<T> best{};
    if (call_.top_k > 0) {
      const vec<T> terms = terms_of_diagonals(table, window, place, h, own, logits);
      best = keep_largest_of_diagonals<T>(logits, window, call_.top_k);
      mark_near_ties(best, terms, careful);
      for (int64_t r = 0; own.any_bad && r < count; ++r) {
        T row[NARROW];
        for (int64_t o = 0; o < window; ++o) row[o] = logits[o * L + r];
        special[r] = special[r] || (is_valid_target(b, token_of(task, i + r)) &&
                                    sees_bad(task, i + r, BAD_VALUE, own, row, i + r - s.before));
      }
    }
    vec<T> highest = broadcast(NONE), total{}, least{};
    for (int64_t o = 0; o < window; ++o) highest = maximum(highest, load(logits + o * L));
    if (call_.is_rbf && sizeof(T) == sizeof(float)) {
      least = highest;
      if (table) least = least_of_diagonals(table, window, logits, highest - T(FADED));
    }
    const vec<T> top = highest == NONE ? vec<T>{} : highest;
    for (int64_t o = 0; o < window; ++o) {
      const vec<T> exponential = exp(load(logits + o * L) - top);
      store(logits + o * L, exponential);
      total += exponential;
    }
    T share[L];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t target = token_of(task, i + r);
      T* kept = kept_of(b, target, h);
      T* lse = static_cast<T*>(call_.lse) + (b * call_.targets + target) * call_.heads + h;
      if (highest[r] == NONE || !is_valid_target(b, target)) {
        kept[0] = MOST, kept[1] = share[r] = 0, *lse = NONE;
      } else {
        special[r] = special[r] || careful[r] || least[r] < T(STEEP);
        kept[0] = highest[r], kept[1] = share[r] = T(1) / total[r];
        *lse = highest[r] + std::log(total[r]);
      }
      if (special[r]) kept[0] = MOST, kept[1] = 1;
      if (call_.top_k > 0) kept[2] = best.threshold[r], kept[3] = best.last[r];
    }
    clear_spare(logits, window);
    std::fill_n(own.sums, L * value_padded_, T(0));
    for (int64_t r = 0; r < count; r += ROWS) {
      T* sums = own.sums + r * value_padded_;
      combine<T, false>(logits + r, OF_ROW<T>, OF_KEY<T>, own.values + (place + r) * value_padded_,
                        value_padded_, window + SPARE, sums, sums);
    }
    write_rows(task, b, h, i, count, special, share, own, exact);
  }

  // The least of every row's logits above a limit, less what the table has added to them; at most 0.
  vec<T> least_of_diagonals(const T* table, int64_t window, const T* logits, vec<T> limit) const {
    vec<T> least{};
    for (int64_t o = 0; o < window; ++o) {
      const vec<T> logit = load(logits + o * Vec<T>::L);
      least = minimum(least, logit > limit ? logit - table[o] : vec<T>{});
    }
    return least;
  }

  // What rounding is relative to, beside the two logits, where it decides what is kept.
  vec<T> terms_of_diagonals(const T* table, int64_t window, int64_t place, int64_t h,
                            const Packed<T>& own, const T* logits) const {
    constexpr int64_t L = Vec<T>::L;
    if (!needs_lengths()) {
      return table ? -least_of_diagonals(table, window, logits, broadcast(NONE)) : vec<T>{};
    }
    T queries[L];
    for (int64_t r = 0; r < L; ++r) queries[r] = length_of(own.query + r * padded_);
    vec<T> keys{};
    for (int64_t o = 0; o < window; ++o) keys = maximum(keys, load(own.lengths + place + o));
    return load(queries) * keys * std::abs(scale_[h]);
  }

  // The rows of which rounding may have decided what is kept, as `is_nearly_a_tie` has it.
  void mark_near_ties(const Kept<T>& best, vec<T> terms, bool* careful) const {
    for (int64_t r = 0; r < Vec<T>::L; ++r) {
      if (sizeof(T) != sizeof(float) || best.next[r] == NONE) continue;
      const T size = std::max(std::abs(best.threshold[r]), std::abs(best.next[r])) + terms[r];
      if (!(best.threshold[r] - best.next[r] > rounding() * size)) careful[r] = true;
    }
  }

  // What targets from i on read, and the last keys that they see.
  Upcoming rows_after(const Task& task, int64_t b, int64_t h, int64_t i,
                      const TokenView& other) const {
    const Sequence& s = *task.sequence;
    Upcoming upcoming;
    const auto set = [&](int64_t n, const TokenView& view, int64_t token, int64_t head) {
      const int64_t size = is_half<T>(view) ? sizeof(uint16_t) : sizeof(T);
      const int64_t place = b * view.batch + token * view.token + head * view.head;
      upcoming.set(n, static_cast<const char*>(view.data) + place * size, s.step * view.token * size);
    };
    set(0, call_.query, token_of(task, i), h);
    set(1, other, token_of(task, i), h);
    set(2, call_.key, s.source + (i + s.after) * s.step, h / repeats_);
    set(3, call_.value, s.source + (i + s.after) * s.step, h / repeats_);
    const int64_t width = std::max(call_.width, call_.value_width);
    upcoming.lines = (bytes_of<T>(call_.query, width) + Upcoming::LINE - 1) / Upcoming::LINE;
    return upcoming;
  }

  void diagonals(bool is_rbf, const T* query, const T* key, int64_t stride, int64_t window,
                 const Upcoming* upcoming, const Packed<T>& own, T* to) const {
    is_rbf ? diagonal_affinities<T, true>(query, key, stride, window, upcoming, own.parts, to)
           : diagonal_affinities<T, false>(query, key, stride, window, upcoming, own.parts, to);
  }

  // `place`: of the first key of the first target.
  void logits_of_diagonals(const Logits<T>& how, const Task& task, int64_t place,
                           const Packed<T>& own, const T* from, T* to) const {
    const Sequence& s = *task.sequence;
    const int64_t hole = s.loops == 1 ? -1 : s.before - s.loops / 2;
    diagonal_logits<T>(how, window_of(s), -s.before, hole, own.usable + place, from, to);
  }

  // Outputs of targets i .. i + count - 1, from their sums.
  void write_rows(const Task& task, int64_t b, int64_t h, int64_t i, int64_t count,
                  const bool* special, const T* share, const Packed<T>& own,
                  BandRow<T>& exact) const {
    for (int64_t r = 0; r < count; ++r) {
      if (special[r]) {
        exact.forward(b, *task.sequence, i + r, h);
        continue;
      }
      const int64_t target = token_of(task, i + r);
      T* sums = own.sums + r * value_padded_;
      const bool nowhere = is_half<T>(call_.out) && !call_.keeps_outputs;
      T* out = nowhere ? sums : exact_output(b, target, h);
      for (int64_t d = 0; d < call_.value_width; ++d) {
        out[d] = share[r] == 0 ? T(0) : sums[d] * share[r];
      }
      if (is_half<T>(call_.out)) write_head(out, call_.value_width, call_.out, b, target, h);
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
  bool needs_lengths() const { return sizeof(T) == sizeof(float) && !call_.is_rbf && call_.top_k > 0; }

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
    if (!call_.is_rbf || sizeof(T) != sizeof(float)) return false;
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

  const BandsCall& call_;
  const Plan<T>& plan_;
  const T* scale_;
  const int64_t repeats_, padded_, value_padded_, numbers_;  // numbers_: kept of a row
  std::vector<T> limits_, table_;
  std::vector<uint8_t> bad_entries_;
  bool any_bad_entry_ = false;
};

}  // namespace graphattn
