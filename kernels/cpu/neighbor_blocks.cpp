// Nearest neighbours, and neighbours within a radius, among points in blocks (point_blocks.h).
//
// A target looks at the nearest boxes first, and at none that is farther than what it has found.
// Distances of a whole block are rounded ones, from differences; float64 decides (shortlist.h).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "interface.h"
#include "point_blocks.h"
#include "shortlist.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t TARGETS = 64;      // of a task
constexpr int64_t MOST_RANKED = 96;  // neighbours, beyond which sorting is faster

// What rounding does to a squared distance from differences of scaled coordinates: one rounding for
// each of them, its square and its sum, and squares that vanish below the smallest number; both in
// the rounded distance and in the exact one, which knows no scale.
template <class T>
Slack slack_of_differences(int64_t width, int exponent) {
  const double relative = 4.0 * static_cast<double>(width + 8) * std::numeric_limits<T>::epsilon();
  double vanishing = 4 * static_cast<double>(width) * std::numeric_limits<T>::min();
  if (sizeof(T) == sizeof(double)) {
    vanishing += std::ldexp(static_cast<double>(4 * width), -1074 + 2 * exponent);
  }
  return {1 + relative, vanishing};
}

// Squared distances of 16 points, or of 16 boxes, by a function of a coordinate. Two sums at a time:
// an addition waits for the one before it.
template <class T, class Gap>
GRAPHATTN_INLINE void squared_gaps(int64_t width, const Gap& gap, vec<T> (&sums)[BLOCK_VECTORS<T>]) {
  constexpr int V = BLOCK_VECTORS<T>;
  vec<T> others[V] = {};
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) sums[v] = vec<T>{};
  int64_t c = 0;
  for (; c + 2 <= width; c += 2) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vec<T> x = gap(c, v), y = gap(c + 1, v);
      sums[v] += x * x;
      others[v] += y * y;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    if (c < width) {
      const vec<T> x = gap(c, v);
      sums[v] += x * x;
    }
    sums[v] += others[v];
  }
}

// Visits blocks, the nearest first, as long as their boxes are within `limit()`.
template <class T, class Look, class Limit>
class Descent {
  static constexpr int L = Vec<T>::L, V = BLOCK_VECTORS<T>;

 public:
  Descent(const PointBlocks<T>& blocks, const T* target, const Look& look, const Limit& limit)
      : blocks_(blocks), target_(target), look_(look), limit_(limit) {}

  void visit(int level, int64_t group) const {
    const T* box = blocks_.box(level, group);
    vec<T> bounds[V];
    squared_gaps<T>(
        blocks_.width(),
        [&](int64_t c, int v) __attribute__((always_inline)) {
          const vec<T> x = broadcast(target_[c]);
          const vec<T> below = load(box + 2 * c * BLOCK_POINTS + v * L) - x;
          const vec<T> above = x - load(box + (2 * c + 1) * BLOCK_POINTS + v * L);
          return maximum(maximum(below, above), vec<T>{});
        },
        bounds);
    for (;;) {
      const vec<T> limit = broadcast(limit_());
      uint32_t near = 0;
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) near |= at_most(bounds[v], limit) << (v * L);
      if (!near) return;
      int child = __builtin_ctz(near);
      if (near & (near - 1)) {
        vec<T> least = bounds[0];
#pragma GCC unroll 8
        for (int v = 1; v < V; ++v) least = minimum(least, bounds[v]);
        const vec<T> nearest = broadcast(least_of(least));
        uint32_t is_nearest = 0;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) is_nearest |= at_most(bounds[v], nearest) << (v * L);
        child = __builtin_ctz(is_nearest);
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const vec<T> lanes = lane_numbers<T>() + T(v * L);
        bounds[v] = lanes == broadcast(T(child)) ? broadcast(std::numeric_limits<T>::infinity())
                                                 : bounds[v];
      }
      const int64_t place = group * BLOCK_POINTS + child;
      if (level) {
        visit(level - 1, place);
        continue;
      }
      const T* block = blocks_.block(place);
      vec<T> squared[V];
      squared_gaps<T>(
          blocks_.width(),
          [&](int64_t c, int v) __attribute__((always_inline)) {
            return load(block + c * BLOCK_POINTS + v * L) - broadcast(target_[c]);
          },
          squared);
      look_(place * BLOCK_POINTS, squared);
    }
  }

 private:
  const PointBlocks<T>& blocks_;
  const T* const target_;
  const Look& look_;
  const Limit& limit_;
};

template <class T, class Look, class Limit>
GRAPHATTN_INLINE void descend(const PointBlocks<T>& blocks, const T* target, const Look& look,
                              const Limit& limit) {
  if (blocks.num_blocks() == 0) return;
  Descent<T, Look, Limit>(blocks, target, look, limit).visit(blocks.levels() - 1, 0);
}

template <class T>
void scaled(const T* x, int64_t width, double scale, T* to) {
  for (int64_t c = 0; c < width; ++c) to[c] = static_cast<T>(static_cast<double>(x[c]) * scale);
}

// A squared radius as rounded distances know it: what is above it is farther, for certain.
template <class T>
T limit_of(double squared, double scale, const Slack& slack) {
  constexpr double most = std::numeric_limits<T>::max();
  const double reach = std::sqrt(squared) * scale;
  const double widened = reach * reach * slack.factor + slack.plus;
  return widened < most / 2 ? static_cast<T>(widened * (1 + 1e-6)) : static_cast<T>(most);
}

// ---- The k nearest ----

template <class T>
struct Search {
  const T *points, *candidates;  // [rows, width], [columns, width]
  int64_t rows, columns, width, k;
  bool to_self, self_loops;  // whether points are the candidates; and their own first neighbours
  double reach;              // squared; infinite: all
  int64_t* index;            // [rows, k]; -1 where there are fewer
};

template <class T>
void find(const Search<T>& search, int threads) {
  const int64_t width = search.width;
  const double largest = largest_coordinate(search.points, search.rows, search.candidates,
                                            search.columns, width);
  const int exponent = scale_exponent<T>(largest);
  const double scale = std::ldexp(1.0, exponent);
  const bool without_self = search.to_self && !search.self_loops;
  const int64_t k = search.k + without_self;
  const PointBlocks<T> blocks(search.candidates, search.columns, width, scale, search.k + 1,
                              threads);
  const Slack slack = slack_of_differences<T>(width, exponent);
  const T begin = limit_of<T>(search.reach, scale, slack);
  const double reach = std::min(search.reach, std::numeric_limits<double>::max());
  const Wanted<T> wanted{blocks.rows(), blocks.order(), width, k, reach};
  std::fill_n(search.index, search.rows * search.k, int64_t{-1});

  // Points themselves in the order of blocks: one after the other finds what it reads in the cache.
  const int64_t targets = search.to_self ? blocks.count() : search.rows;
  const int64_t tasks = (targets + TARGETS - 1) / TARGETS;
  threads = threads_worth(static_cast<double>(targets) * (200 + k) * (width + 10), threads);
  const int64_t room = room_for(k), values = room + BEYOND_ROOM<T>;
  const int workers = worker_count(tasks, threads);
  Buffer<T> value_memory(workers * values), target_memory(workers * width);
  Buffer<int32_t> place_memory(workers * values);
  Buffer<double> squared_memory(workers * values);
  Buffer<Neighbor> found_memory(workers * values);
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    const Decided memory{squared_memory.data() + worker * values,
                         found_memory.data() + worker * values};
    T* place_of_target = target_memory.data() + worker * width;
    Shortlist<T> list{value_memory.data() + worker * values, place_memory.data() + worker * values,
                      0, 0, 0};
    const int64_t end = std::min(targets, (task + 1) * TARGETS);
    for (int64_t t = task * TARGETS; t < end; ++t) {
      const int64_t row = search.to_self ? blocks.order()[t] : t;
      const T* point = search.points + row * width;
      if (!search.to_self && !is_finite_row(point, width)) continue;
      const Target<T> target{point, search.to_self ? row : -1};
      scaled(point, width, scale, place_of_target);
      list.begin(begin);
      const auto look = [&](int64_t first, const vec<T> (&squared)[BLOCK_VECTORS<T>])
          __attribute__((always_inline)) {
        const vec<T> limit = broadcast(list.limit);
#pragma GCC unroll 8
        for (int v = 0; v < BLOCK_VECTORS<T>; ++v) {
          const uint32_t bits = at_most(squared[v], limit);
          if (bits) list.take(squared[v], bits, first + v * Vec<T>::L);
        }
        if (list.is_full(k)) list.make_room(wanted, target, slack, memory);
      };
      descend(blocks, place_of_target, look, [&] { return list.limit; });
      list.write_nearest(wanted, target, slack, memory, search.self_loops, search.k,
                         search.index + row * search.k);
    }
  });
}

// ---- All within a radius ----

template <class T>
struct Ball {
  const T *points, *candidates;  // [rows, width], [columns, width]
  int64_t rows, columns, width;
  bool to_self, self_loops;  // whether points are the candidates; and whether they see themselves
  double reach;              // squared
  int64_t capacity;  // of `found`
  int32_t* found;    // neighbours, ascending, of one row after the other, in any order of rows
  int64_t *start, *count;  // [rows]: where those of a row stand in `found`, and how many they are
};

// Ascending. Ranks, a vector of them at a time, instead of branches that nobody can foretell.
void sort_few(int32_t* x, int64_t count, int32_t* memory) {
  if (count > MOST_RANKED) {
    std::sort(x, x + count);
    return;
  }
  int32_t* rank = memory + MOST_RANKED;
  std::fill_n(rank, count, 0);
  for (int64_t j = 0; j < count; ++j) {
    const int32_t other = x[j];
    for (int64_t i = 0; i < count; ++i) rank[i] += other < x[i];
  }
  for (int64_t i = 0; i < count; ++i) memory[rank[i]] = x[i];
  std::copy_n(memory, count, x);
}

// Returns how many neighbours there are; where they are more than `capacity`, some are not written.
template <class T>
int64_t find_all(const Ball<T>& ball, int threads) {
  constexpr int L = Vec<T>::L, V = BLOCK_VECTORS<T>;
  const int64_t width = ball.width;
  const double largest =
      largest_coordinate(ball.points, ball.rows, ball.candidates, ball.columns, width);
  const int exponent = scale_exponent<T>(largest);
  const double scale = std::ldexp(1.0, exponent);
  const PointBlocks<T> blocks(ball.candidates, ball.columns, width, scale, ball.columns, threads);
  const Slack slack = slack_of_differences<T>(width, exponent);
  const T limit = limit_of<T>(ball.reach, scale, slack);
  const double reach = std::min(ball.reach, std::numeric_limits<double>::max());
  // Rounded distances up to here are within the radius, for certain.
  const double scaled_reach = std::sqrt(reach) * scale;
  const double sure = scaled_reach * scaled_reach / slack.factor - slack.plus;
  const bool is_known = sure > 0 && sure < std::numeric_limits<T>::max() / 2;
  const T certain = is_known ? static_cast<T>(sure * (1 - 1e-6)) : T(-1);
  std::fill_n(ball.start, ball.rows, int64_t{0});
  std::fill_n(ball.count, ball.rows, int64_t{0});

  const int64_t targets = ball.to_self ? blocks.count() : ball.rows;
  const int64_t tasks = (targets + TARGETS - 1) / TARGETS;
  threads = threads_worth(static_cast<double>(targets) * 200 * (width + 10), threads);
  const int workers = worker_count(tasks, threads);
  Buffer<T> target_memory(workers * width);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(workers));
  std::atomic<int64_t> total{0};
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    T* target = target_memory.data() + worker * width;
    std::vector<int32_t>& list = lists[static_cast<size_t>(worker)];
    const int64_t first_target = task * TARGETS, end = std::min(targets, (task + 1) * TARGETS);
    int64_t held = 0, starts[TARGETS];
    int32_t sorted[2 * MOST_RANKED];
    for (int64_t t = first_target; t < end; ++t) {
      const int64_t row = ball.to_self ? blocks.order()[t] : t;
      const T* point = ball.points + row * width;
      const int64_t start = starts[t - first_target] = held;
      if (!ball.to_self && !is_finite_row(point, width)) continue;
      scaled(point, width, scale, target);
      const auto look = [&](int64_t first, const vec<T> (&squared)[V])
          __attribute__((always_inline)) {
        uint32_t inside = 0, perhaps = 0;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          inside |= at_most(squared[v], broadcast(certain)) << (v * L);
          perhaps |= at_most(squared[v], broadcast(limit)) << (v * L);
        }
        for (perhaps &= ~inside; perhaps; perhaps &= perhaps - 1) {
          const int lane = __builtin_ctz(perhaps);
          const int32_t place = static_cast<int32_t>(first) + lane;
          double exact;
          squared_distances(point, blocks.rows(), width, 1, &place, &exact);
          inside |= static_cast<uint32_t>(exact <= reach) << lane;
        }
        if (static_cast<int64_t>(list.size()) < held + BLOCK_POINTS) {
          list.resize(static_cast<size_t>(2 * held + 1024));
        }
        const int32_t* index = blocks.order() + first;
        for (; inside; inside &= inside - 1) {
          const int32_t source = index[__builtin_ctz(inside)];
          list[static_cast<size_t>(held)] = source;
          held += source != row || !ball.to_self || ball.self_loops;
        }
      };
      descend(blocks, target, look, [&] { return limit; });
      sort_few(list.data() + start, held - start, sorted);
      ball.count[row] = held - start;
    }
    const int64_t at = total.fetch_add(held, std::memory_order_relaxed);
    for (int64_t t = first_target; t < end; ++t) {
      ball.start[ball.to_self ? blocks.order()[t] : t] = at + starts[t - first_target];
    }
    if (at + held <= ball.capacity) std::copy_n(list.begin(), held, ball.found + at);
  });
  return total;
}

// Edges [2, total] by target, then source, of what has been found.
void write_edges(const int32_t* found, const int64_t* start, const int64_t* count, int64_t rows,
                 int64_t total, int64_t* edges, int threads) {
  constexpr int64_t SOME = 256;
  Buffer<int64_t> first(rows);
  int64_t before = 0;
  for (int64_t i = 0; i < rows; ++i) first[i] = before, before += count[i];
  huge(edges, 2 * total * static_cast<int64_t>(sizeof(int64_t)));
  threads = threads_worth(4.0 * static_cast<double>(total + rows), threads);
  parallel_tasks((rows + SOME - 1) / SOME, threads, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * SOME);
    for (int64_t i = task * SOME; i < end; ++i) {
      std::copy_n(found + start[i], count[i], edges + first[i]);
      std::fill_n(edges + total + first[i], count[i], i);
    }
  });
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

#define GRAPHATTN_NEIGHBOR_BLOCKS(T)                                                             \
  GRAPHATTN_API int32_t graphattn_nearest_by_blocks_##T(                                         \
      const T* points, const T* candidates, int64_t rows, int64_t columns, int64_t width,        \
      int64_t k, int32_t to_self, int32_t self_loops, double reach, int64_t* index,              \
      int32_t threads) {                                                                         \
    return guarded([&] {                                                                         \
      find<T>({points, candidates, rows, columns, width, k, to_self != 0, self_loops != 0,       \
               reach, index},                                                                    \
              threads);                                                                          \
    });                                                                                          \
  }                                                                                              \
                                                                                                 \
  GRAPHATTN_API int32_t graphattn_within_radius_##T(                                             \
      const T* points, const T* candidates, int64_t rows, int64_t columns, int64_t width,        \
      int32_t to_self, int32_t self_loops, double reach, int64_t capacity, int32_t* found,       \
      int64_t* start, int64_t* count, int64_t* total, int32_t threads) {                         \
    return guarded([&] {                                                                         \
      *total = find_all<T>({points, candidates, rows, columns, width, to_self != 0,              \
                            self_loops != 0, reach, capacity, found, start, count},              \
                           threads);                                                             \
    });                                                                                          \
  }

GRAPHATTN_NEIGHBOR_BLOCKS(float)
GRAPHATTN_NEIGHBOR_BLOCKS(double)

GRAPHATTN_API int32_t graphattn_edges_of_lists(const int32_t* found, const int64_t* start,
                                               const int64_t* count, int64_t rows, int64_t total,
                                               int64_t* edges, int32_t threads) {
  return guarded([&] { write_edges(found, start, count, rows, total, edges, threads); });
}
