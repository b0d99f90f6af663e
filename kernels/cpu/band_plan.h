// How bands are cut into tasks, and the memory that a task works in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "band_diagonals.h"
#include "band_tiles.h"
#include "bands.h"
#include "feature_sums.h"
#include "precision.h"
#include "simd.h"

namespace graphattn {

// Targets of a task. What those of a narrow window read should stay in the second cache for all heads.
constexpr int64_t MOST_TARGETS = 1024, MOST_OF_NARROW = 256, LEAST_TARGETS = 128;

// In front of and behind a table: tiles read some entries that belong to no edge.
constexpr int64_t MARGIN = 2 * BLOCK;

GRAPHATTN_INLINE int64_t rounded_up(int64_t x, int64_t step) {
  return (x + step - 1) / step * step;
}

// Targets first .. last - 1 of a sequence, and the keys low .. high - 1 that they see, of which
// those up to own_high are nobody else's or are added to by later tasks.
struct Task {
  const Sequence* sequence;
  int64_t first, last, low, high, begin, keys;  // packed are `keys` from `begin`
  int64_t own_low, own_high, halo;              // where its part of the halos begins, in keys
  bool is_narrow;                               // whether rows go offset by offset, not in tiles
};

int64_t window_of(const Sequence& s) { return std::max<int64_t>(0, s.before + s.after + 1); }

// Offset by offset, sums of features go across lanes once per edge, which tiles do without: that pays
// where tiles would be nearly empty or features are many. Selection is half as long there.
template <class T>
bool is_narrow(const BandsCall& call, const Sequence& s) {
  const int64_t vectors = whole_vectors<T>(call.width) / Vec<T>::L;
  const int64_t most = call.top_k > 0 ? NARROW_TOP_K : std::min<int64_t>(NARROW, 6 * vectors + 3);
  return window_of(s) <= most && 2 * window_of(s) <= s.sources;
}

// A backward keeps gradients for all keys that its tasks share: with long windows, tasks are longer.
int64_t targets_of_task(const Sequence& s, bool is_narrow, bool is_backward) {
  const int64_t window = is_backward ? std::min(s.before + s.after + 1, s.sources) : 0;
  const int64_t most = is_narrow ? MOST_OF_NARROW : MOST_TARGETS;
  const int64_t few = std::clamp(rounded_up(s.targets / 4, BLOCK), LEAST_TARGETS, most);
  return std::max(few, rounded_up(window / 2, BLOCK));
}

// All tasks of one sample and key head, and the most that one of them needs.
template <class T>
struct Plan {
  std::vector<Task> tasks;
  int64_t keys = 0, row = 0, halo = 0, window = 0;
  double pairs = 0;

  Plan(const BandsCall& call, bool is_backward) {
    for (int64_t n = 0; n < call.count; ++n) add(call, call.sequences[n], is_backward);
  }

 private:
  void add(const BandsCall& call, const Sequence& s, bool is_backward) {
    const bool narrow = is_narrow<T>(call, s);
    const int64_t size = targets_of_task(s, narrow, is_backward);
    const auto low_of = [&](int64_t first) {
      return std::clamp<int64_t>(first - s.before, 0, s.sources);
    };
    const int64_t seen = std::min(window_of(s), s.sources);
    pairs += double(s.targets) * double(seen);
    window = std::max(window, window_of(s));
    row = std::max(row, seen + QUERIES + 4 * BLOCK);
    for (int64_t first = 0; first < std::max<int64_t>(s.targets, 1); first += size) {
      Task t;
      t.is_narrow = narrow;
      t.sequence = &s, t.first = first, t.last = std::min(s.targets, first + size);
      t.low = low_of(first), t.high = std::clamp(t.last + s.after, t.low, s.sources);
      if (narrow) {
        t.begin = first - s.before;
        t.keys = rounded_up(t.last - first, BLOCK) + window_of(s) + SPARE;
      } else {
        t.begin = t.low / BLOCK * BLOCK, t.keys = rounded_up(t.high - t.begin, BLOCK);
      }
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

// Targets that are computed together, at most.
template <class T>
constexpr int64_t MOST_ROWS = std::max<int64_t>(Vec<T>::L, QUERIES);

// What a worker has packed: keys and values of a task, queries of a few targets.
template <class T>
struct Packed {
  T *keys, *values, *usable, *lengths, *query, *logits, *sums;
  T* parts;  // of narrow windows: [OFFSETS, L, L]
  T* room;   // [ROOMS, room_width]: tokens of half precision as floats
  int64_t room_width;
  Ordered<T>* order;
  uint8_t* bad;
  bool any_bad = false;

  Packed(Pieces<T>& from, const BandsCall& call, const Plan<T>& plan) {
    const int64_t P = whole_vectors<T>(call.width), V = whole_vectors<T>(call.value_width);
    keys = from.take(plan.keys * P), values = from.take(plan.keys * V);
    usable = from.take(plan.keys), lengths = from.take(plan.keys);
    query = from.take(MOST_ROWS<T> * P);
    logits = from.take(QUERIES * plan.row);
    sums = from.take(MOST_ROWS<T> * V);
    parts = from.take(OFFSETS * Vec<T>::L * Vec<T>::L);
    order = reinterpret_cast<Ordered<T>*>(from.take(plan.row));
    bad = reinterpret_cast<uint8_t*>(from.take(plan.keys));
    room_width = whole_vectors<T>(std::max(call.width, call.value_width));
    room = from.take(ROOMS * room_width);
  }

  T* room_of(int64_t n) const { return room + n * room_width; }

 private:
  // A vector of keys and of their values, or a few queries and gradients of their outputs.
  static constexpr int64_t ROOMS = 2 * MOST_ROWS<T>;
};

// What a worker has beside that in the backward: the task's keys in rows and values in columns,
// the gradients of both, and a block of targets and of weights.
template <class T>
struct Backward {
  T *key_rows, *value_columns, *d_keys, *d_values;
  T *query, *query_rows, *d_out, *d_out_rows, *d_query, *out;
  T *affinity, *logit, *pull, *weight;            // [BLOCK, BLOCK]
  T *highest, *share, *threshold, *last, *less;  // [BLOCK]
  T* d_table;                                     // [window], with margins

  Backward(Pieces<T>& from, const BandsCall& call, const Plan<T>& plan) {
    const int64_t P = whole_vectors<T>(call.width), V = whole_vectors<T>(call.value_width);
    key_rows = from.take(plan.keys * P), d_keys = from.take(plan.keys * P);
    value_columns = from.take(plan.keys * call.value_width);
    d_values = from.take(plan.keys * V);
    query = from.take(BLOCK * call.width), d_out = from.take(BLOCK * call.value_width);
    query_rows = from.take(BLOCK * P), d_query = from.take(BLOCK * P);
    d_out_rows = from.take(BLOCK * V);
    out = from.take(MOST_ROWS<T> * V);
    for (T** block : {&affinity, &logit, &pull, &weight}) *block = from.take(BLOCK * BLOCK);
    for (T** row : {&highest, &share, &threshold, &last, &less}) *row = from.take(BLOCK);
    d_table = from.take(call.table ? plan.window + 2 * MARGIN : 0);
  }
};

}  // namespace graphattn
