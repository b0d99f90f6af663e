// What may be among the nearest of a target, while blocks of rounded distances come by.
//
// A list keeps every place whose rounded distance is no larger than what the k-th nearest may have
// come to by rounding. Where it is full, it finds a number that at least k of its distances do not
// exceed, and drops what is beyond it and the slack; where too many are left (ties, and points
// closer to each other than rounded distances can tell), float64 decides which k stay. So a list
// never overflows, and what stands in it at the end holds the k nearest, for any points.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "exact_distances.h"
#include "masks.h"
#include "simd.h"

namespace graphattn {

// Where the k-th smallest rounded distance is x, none of the k nearest has one above factor * x +
// plus.
struct Slack {
  double factor, plus;
};

// Candidates and what is wanted of them.
template <class T>
struct Wanted {
  const T* rows;         // [places, width], as they were given
  const int32_t* index;  // [places]: which candidate that is
  int64_t width;
  int64_t k;             // how many are kept for a target, itself among them
  double reach;          // squared: what is farther is no neighbour
};

// A target: its coordinates as they were given, and which candidate it is itself, or -1.
template <class T>
struct Target {
  const T* point;
  int64_t itself;
};

constexpr int64_t MOST_APPENDED = 32;  // places at a time

// How many places a list has memory for; behind them a vector more may be written.
inline int64_t room_for(int64_t k) { return (k + std::max<int64_t>(k, 48) + 31) / 16 * 16; }

template <class T>
constexpr int64_t BEYOND_ROOM = Vec<T>::L;

struct Neighbor {
  double squared;
  int32_t index, slot;

  bool operator<(const Neighbor& other) const {
    return squared < other.squared || (squared == other.squared && index < other.index);
  }
};

constexpr int64_t FEW = 48;  // neighbours that are ranked, not sorted

// Memory of a worker in which lists are decided about.
struct Decided {
  double* squared;  // [room]
  Neighbor* found;  // [room]
};

template <class T>
struct Shortlist {
  T* value;        // [room + BEYOND_ROOM], rounded
  int32_t* place;  // the same
  int64_t count;
  T bound;  // at least k of the places seen so far are not above it; at first the largest number
  T limit;  // the same with slack: what is above it, or NaN, is not among the nearest

  void begin(T largest) {
    count = 0;
    bound = limit = largest;
  }

  GRAPHATTN_INLINE void take(vec<T> x, uint32_t bits, int64_t first) {
    constexpr auto lanes = std::make_index_sequence<Vec<T>::L>();
    const auto places = places_from<T>(static_cast<int32_t>(first), lanes);
    count = append_lanes<T>(x, bits, places, value, place, count);
  }

  bool is_full(int64_t k) const { return count > room_for(k) - MOST_APPENDED; }

  // Makes room for so many as are appended at a time.
  void make_room(const Wanted<T>& wanted, const Target<T>& target, const Slack& slack,
                 const Decided& memory) {
    thin_out(wanted.k, slack);
    if (is_full(wanted.k)) keep_nearest(wanted, target, slack, memory);
  }

  // Leaves what is within the slack of a number near the k-th smallest.
  __attribute__((noinline)) void thin_out(int64_t k, const Slack& slack) {
    if (count <= k) return;
    constexpr int64_t L = Vec<T>::L;
    const T none = std::numeric_limits<T>::infinity();
    store(value + count, broadcast(none));  // whole vectors
    vec<T> least = broadcast(none), most = broadcast(-none);
    for (int64_t i = 0; i < count; i += L) {
      const vec<T> x = load(value + i);
      least = minimum(least, x);
      most = maximum(most, x < none ? x : broadcast(-none));
    }
    const auto count_to = [&](T x) {
      int64_t found = 0;
      for (int64_t i = 0; i < count; i += L) {
        found += __builtin_popcount(at_most(load(value + i), broadcast(x)));
      }
      return found;
    };
    T low = least_of(least), high = std::min(bound, largest(most));
    if (count_to(low) >= k) high = low;
    const int64_t enough = k + k / 8;
    while (low < high) {  // at least k are not above `high`, and fewer not above `low`
      const T middle = low + (high - low) / 2;
      if (!(middle > low && middle < high)) break;
      const int64_t found = count_to(middle);
      if (found < k) {
        low = middle;
        continue;
      }
      high = middle;
      if (found <= enough) break;
    }
    set_bound(high, slack);
    int64_t left = 0;
    const vec<T> limits = broadcast(limit);
    for (int64_t i = 0; i < count; i += L) {
      const vec<T> x = load(value + i);
      typename Places<T>::type places;
      std::memcpy(&places, place + i, sizeof places);
      left = append_lanes<T>(x, at_most(x, limits), places, value, place, left);
    }
    count = left;
  }

  // Of the places in the list only the k nearest, by float64.
  void keep_nearest(const Wanted<T>& wanted, const Target<T>& target, const Slack& slack,
                    const Decided& memory) {
    const int64_t found = decide(wanted, target, memory);
    const int64_t kept = std::min(wanted.k, found);
    std::nth_element(memory.found, memory.found + kept, memory.found + found);
    std::sort(memory.found, memory.found + kept,
              [](const Neighbor& a, const Neighbor& b) { return a.slot < b.slot; });
    T most = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < kept; ++i) {  // slots ascend: none is written before it is read
      const int32_t slot = memory.found[i].slot;
      value[i] = value[slot];
      place[i] = place[slot];
      most = std::max(most, value[i]);
    }
    count = kept;
    if (kept == wanted.k) set_bound(most, slack);
  }

  // The k nearest, oneself first where it may be: indices of candidates by distance, equal ones by
  // index. Where there are fewer, what stands in `index` stays.
  void write_nearest(const Wanted<T>& wanted, const Target<T>& target, const Slack& slack,
                     const Decided& memory, bool self_loops, int64_t k, int64_t* index) {
    thin_out(wanted.k, slack);
    int64_t found = decide(wanted, target, memory), written = 0;
    Neighbor* nearest = memory.found;
    if (target.itself >= 0) {
      // Whether it was among the candidates or left out as one of many equal points.
      found = std::remove_if(nearest, nearest + found, [](const Neighbor& x) {
                return x.squared < 0;
              }) - nearest;
      if (self_loops) index[written++] = target.itself;
    }
    const int64_t kept = std::min(k - written, found);
    if (found <= FEW) {  // ranks instead of a sort: no branch depends on a distance
      double squared[FEW];
      int64_t number[FEW], rank[FEW];
      for (int64_t i = 0; i < found; ++i) {
        squared[i] = nearest[i].squared;
        number[i] = nearest[i].index;
        rank[i] = 0;
      }
      for (int64_t j = 0; j < found; ++j) {
        const double other = squared[j];
        const int64_t index_of_other = number[j];
        for (int64_t i = 0; i < found; ++i) {
          const bool is_tie = other == squared[i];
          rank[i] += (other < squared[i]) | (is_tie & (index_of_other < number[i]));
        }
      }
      for (int64_t i = 0; i < found; ++i) {
        if (rank[i] < kept) index[written + rank[i]] = number[i];
      }
    } else {
      std::partial_sort(nearest, nearest + kept, nearest + found);
      for (int64_t i = 0; i < kept; ++i) index[written + i] = nearest[i].index;
    }
  }

  // The neighbours among the places of the list with their squared distances, oneself as nearer than
  // all; returns how many are in reach.
  int64_t decide(const Wanted<T>& wanted, const Target<T>& target, const Decided& memory) const {
    for (int64_t i = 0; i < count; ++i) {
      prefetch(wanted.rows + static_cast<int64_t>(place[i]) * wanted.width,
               std::min<int64_t>(wanted.width * static_cast<int64_t>(sizeof(T)), 1024));
    }
    squared_distances(target.point, wanted.rows, wanted.width, count, place, memory.squared);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t j = wanted.index[place[i]];
      const double squared = memory.squared[i];
      const bool itself = j == target.itself;
      memory.found[found] = {itself ? -1 : squared, j, static_cast<int32_t>(i)};
      found += squared <= wanted.reach;
    }
    return found;
  }

 private:
  void set_bound(T x, const Slack& slack) {
    bound = std::min(bound, x);
    const double widened = slack.factor * static_cast<double>(x) + slack.plus;
    constexpr double most = std::numeric_limits<T>::max();
    if (!(widened < most)) return;
    const T rounded = static_cast<T>(widened);  // and up
    limit = std::min(limit, rounded + std::abs(rounded) * std::numeric_limits<T>::epsilon());
  }
};

}  // namespace graphattn
