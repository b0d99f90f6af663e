// Nearest neighbours among points of many coordinates: matrix products in registers, never stored.
//
// With both sets centred, |b|^2 - 2 a.b ranks candidates b of a target a as |a - b|^2 does. A tile of
// a few targets and two vectors of candidates is multiplied in registers and compared with the limits
// of its targets there; what is below them joins their lists, and float64 decides (shortlist.h).
//
// Rounding. A product of C terms is off by at most C eps / 2 of the product of norms (Higham,
// *Accuracy and Stability of Numerical Algorithms*, 3.1), twice, and centring and norms by a few eps
// more: together by c (|a|^2 + |b|^2), c = 2 (C + 16) eps. Candidates are packed with
// (1 - c) |b|^2, so v = (1 - c) |b|^2 - 2 a.b is at most |a - b|^2 - |a|^2 + c |a|^2, however long b
// is; an outlier costs the others nothing. On the other side |a - b|^2 - |a|^2 is at most
// v + 2 c |b|^2 + c |a|^2, where |b|^2 <= 2 |a|^2 + 2 |a - b|^2.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "columns.h"
#include "interface.h"
#include "points.h"
#include "shortlist.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

#if defined(__AVX512F__)
constexpr int TARGETS = 12;  // of a tile: with two vectors of candidates 24 sums, of 32 registers
#elif defined(__AVX2__)
constexpr int TARGETS = 6;  // 12 of 16
#else
constexpr int TARGETS = 4;  // without instructions for a product and a sum, it takes one more
#endif

template <class T>
constexpr int64_t PANEL = 2 * Vec<T>::L;  // candidates of a tile

constexpr int64_t SAMPLE = 63;  // rows whose median is the centre: few that are far do not move it

template <class T>
struct Search {
  const T *points, *candidates;  // [rows, width], [columns, width]
  int64_t rows, columns, width, k;
  bool to_self, self_loops;  // whether points are the candidates; and their own first neighbours
  int64_t* index;            // [rows, k]; -1 where there are fewer
};

// How points are centred and scaled.
template <class T>
struct Frame {
  std::vector<double> center;  // scaled
  double scale;
  double c;  // of the bound above
};

template <class T>
Frame<T> frame_of(const Search<T>& search, const std::vector<int32_t>& finite) {
  const int64_t width = search.width, count = static_cast<int64_t>(finite.size());
  const double largest = largest_coordinate(search.points, search.rows, search.candidates,
                                            search.columns, width);
  Frame<T> frame;
  frame.scale = std::ldexp(1.0, scale_exponent<T>(largest));
  frame.c = 2.0 * static_cast<double>(width + 16) * std::numeric_limits<T>::epsilon();
  frame.center.assign(static_cast<size_t>(width), 0.0);
  const int64_t some = std::min(count, SAMPLE);
  std::vector<T> sample(static_cast<size_t>(some));
  for (int64_t d = 0; some && d < width; ++d) {
    for (int64_t i = 0; i < some; ++i) {
      const int64_t row = finite[static_cast<size_t>(i * count / some)];
      sample[static_cast<size_t>(i)] = search.candidates[row * width + d];
    }
    std::nth_element(sample.begin(), sample.begin() + some / 2, sample.end());
    frame.center[static_cast<size_t>(d)] =
        static_cast<double>(sample[static_cast<size_t>(some / 2)]) * frame.scale;
  }
  return frame;
}

// A point centred and scaled; returns its squared norm. (Both terms are scaled by themselves: the
// difference of two of the largest doubles is infinite.)
template <class T>
double centre(const T* x, int64_t width, const Frame<T>& frame, T* to) {
  constexpr int64_t SUMS_AT_ONCE = 8;
  double sums[SUMS_AT_ONCE] = {};
  const auto put = [&](int64_t d, double& sum) __attribute__((always_inline)) {
    const double value = static_cast<double>(x[d]) * frame.scale - frame.center[d];
    to[d] = static_cast<T>(value);
    sum += value * value;
  };
  int64_t d = 0;
  for (; d + SUMS_AT_ONCE <= width; d += SUMS_AT_ONCE) {
    for (int64_t i = 0; i < SUMS_AT_ONCE; ++i) put(d + i, sums[i]);
  }
  for (; d < width; ++d) put(d, sums[0]);
  for (int64_t i = 1; i < SUMS_AT_ONCE; ++i) sums[0] += sums[i];
  return sums[0];
}

// Panels of candidates, [width + 1][PANEL] each: first their squared norms, infinite behind the last.
template <class T>
void pack_candidates(const Search<T>& search, const Frame<T>& frame,
                     const std::vector<int32_t>& finite, T* panels, int threads) {
  constexpr int64_t L = Vec<T>::L;
  const int64_t width = search.width, count = static_cast<int64_t>(finite.size());
  const int64_t tasks = (count + L - 1) / L;
  Buffer<T> memory(worker_count(tasks, threads) * L * width);
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    T* centred = memory.data() + worker * L * width;
    T* norms = panels + task / 2 * (width + 1) * PANEL<T> + task % 2 * L;
    const T* rows[L];
    for (int64_t lane = 0; lane < L; ++lane) {
      const int64_t place = task * L + lane;
      rows[lane] = nullptr;
      norms[lane] = std::numeric_limits<T>::infinity();
      if (place >= count) continue;
      const T* from = search.candidates + finite[static_cast<size_t>(place)] * width;
      rows[lane] = centred + lane * width;
      const double norm = centre(from, width, frame, centred + lane * width);
      norms[lane] = static_cast<T>(norm * (1 - frame.c));
    }
    put_columns<T, L>(rows, width, norms + PANEL<T>, PANEL<T>);
  });
  if (tasks % 2 == 0) return;
  T* norms = panels + tasks / 2 * (width + 1) * PANEL<T> + L;  // of half a panel that is not there
  for (int64_t d = 0; d <= width; ++d) {
    std::fill_n(norms + d * PANEL<T>, L, d ? T(0) : std::numeric_limits<T>::infinity());
  }
}

// Targets of a tile, [width][TARGETS], and up to a vector behind them; zeros for those that are null.
// Returns their squared norms. `centred` has room for TARGETS of them.
template <class T>
void pack_targets(const T* const* points, int64_t width, const Frame<T>& frame, T* centred, T* to,
                  double* norms) {
  constexpr int L = Vec<T>::L;
  const T* rows[std::max(L, TARGETS)] = {};
  for (int64_t r = 0; r < TARGETS; ++r) {
    norms[r] = 0;
    if (!points[r]) continue;
    T* row = centred + r * width;
    norms[r] = centre(points[r], width, frame, row);
    for (int64_t d = 0; d < width; ++d) row[d] *= T(-2);
    rows[r] = row;
  }
  if constexpr (L >= TARGETS) {  // lanes behind the last are written over by the next column
    put_columns<T, L>(rows, width, to, TARGETS);
  } else {
    for (int64_t d = 0; d < width; ++d) {
      for (int64_t r = 0; r < TARGETS; ++r) to[d * TARGETS + r] = rows[r] ? rows[r][d] : T(0);
    }
  }
}

// v of all pairs of a tile, and which are within the limits of their targets: bits[r]. Returns the
// targets r of which any are, as bits; 0 where v has not been written.
template <class T>
__attribute__((noinline)) uint32_t multiply(const T* target, const T* panel, int64_t width,
                                            const T* limits, T (*to)[PANEL<T>], uint32_t* bits) {
  constexpr int L = Vec<T>::L;
  vec<T> v[TARGETS][2];
  const vec<T> norms[2] = {load(panel), load(panel + L)};
#pragma GCC unroll 16
  for (int r = 0; r < TARGETS; ++r) v[r][0] = norms[0], v[r][1] = norms[1];
  const T* candidate = panel + PANEL<T>;
  for (int64_t d = 0; d < width; ++d) {
    const vec<T> b0 = load(candidate + d * PANEL<T>), b1 = load(candidate + d * PANEL<T> + L);
#pragma GCC unroll 16
    for (int r = 0; r < TARGETS; ++r) {
      const vec<T> a = broadcast(target[d * TARGETS + r]);
      v[r][0] += a * b0;
      v[r][1] += a * b1;
    }
  }
  uint32_t near = 0;
#pragma GCC unroll 16
  for (int r = 0; r < TARGETS; ++r) {
    const vec<T> limit = broadcast(limits[r]);
    bits[r] = at_most(v[r][0], limit) | at_most(v[r][1], limit) << L;
    near |= static_cast<uint32_t>(bits[r] != 0) << r;
  }
  if (!near) return 0;
#pragma GCC unroll 16
  for (int r = 0; r < TARGETS; ++r) {
    store(to[r], v[r][0]);
    store(to[r] + L, v[r][1]);
  }
  return near;
}

// What a worker holds of a group of targets, some tiles one after the other.
template <class T>
struct Group {
  Group(int64_t tiles, int64_t width, int64_t room)
      : packed(tiles * TARGETS * width + Vec<T>::L), centred(TARGETS * width), values(tiles * TARGETS * room), limits(tiles * TARGETS),
        places(tiles * TARGETS * room), squared(room), found(room),
        lists(static_cast<size_t>(tiles * TARGETS)), slack(lists.size()), target(lists.size()) {}

  Buffer<T> packed, centred, values, limits;
  Buffer<int32_t> places;
  Buffer<double> squared;
  Buffer<Neighbor> found;
  std::vector<Shortlist<T>> lists;
  std::vector<Slack> slack;
  std::vector<Target<T>> target;
};

// At least k candidates have d^2 - |a|^2 <= v + c |a|^2 + 2 c |b|^2 with |b|^2 <= 2 |a|^2 + 2 d^2:
// (1 - 4 c) d^2 <= v + (1 + 5 c) |a|^2. Whoever is as near has v <= d^2 - (1 - c) |a|^2. With
// c <= 1/64, 1 / (1 - 4 c) <= 1 + 4.3 c; what is more is for the rounding of this bound itself.
template <class T>
Slack slack_of_products(double norm, const Frame<T>& frame, int64_t width) {
  const double c = frame.c, vanishing = 8.0 * static_cast<double>(width + 1);
  const bool is_known = c <= 1.0 / 64;
  if (!is_known) return {1, std::numeric_limits<double>::infinity()};
  double plus = 14 * c * norm + vanishing * std::numeric_limits<T>::min();
  // Exact distances know no scale: their squares may vanish.
  if (sizeof(T) == sizeof(double)) plus += vanishing * 0x1p-1074 * frame.scale * frame.scale;
  return {1 + 5 * c, plus};
}

template <class T>
void find(const Search<T>& search, int threads) {
  const int64_t width = search.width;
  const std::vector<int32_t> finite =
      first_copies(search.candidates, finite_rows(search.candidates, search.columns, width), width,
                   search.k + 1);
  const auto count = static_cast<int64_t>(finite.size());
  const Frame<T> frame = frame_of(search, finite);
  const int64_t panels = (count + PANEL<T> - 1) / PANEL<T>, stride = (width + 1) * PANEL<T>;
  threads = threads_worth(static_cast<double>(search.rows) * (count + 1) * (width + 10) / 16,
                          threads);
  Buffer<T> packed(panels * stride);
  huge(packed.data(), panels * stride * static_cast<int64_t>(sizeof(T)));
  pack_candidates(search, frame, finite, packed.data(), threads);

  const int64_t k = search.k + (search.to_self && !search.self_loops);
  const int64_t room = room_for(k) + BEYOND_ROOM<T>;
  // A group of targets stays in the second cache while all candidates pass by.
  constexpr int64_t CACHED = 256 << 10;
  const int64_t of_tile = TARGETS * (width + 2 * room) * static_cast<int64_t>(sizeof(T));
  const int64_t all_tiles = (search.rows + TARGETS - 1) / TARGETS;
  const int64_t tiles = std::clamp<int64_t>(CACHED / of_tile, 1,
                                            std::clamp<int64_t>(all_tiles / (4 * threads), 1, 16));
  const int64_t tasks = (all_tiles + tiles - 1) / tiles;
  // Rows of candidates are looked up by place: where some are left out, in a copy.
  std::vector<T> copied;
  const T* rows = search.candidates;
  if (count < search.columns) {
    copied.resize(finite.size() * static_cast<size_t>(width));
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(rows + finite[static_cast<size_t>(i)] * width, width, copied.data() + i * width);
    }
    rows = copied.data();
  }
  const Wanted<T> wanted{rows, finite.data(), width, k, std::numeric_limits<double>::max()};
  std::fill_n(search.index, search.rows * search.k, int64_t{-1});

  std::vector<std::unique_ptr<Group<T>>> groups;
  for (int w = 0; w < worker_count(tasks, threads); ++w) {
    groups.push_back(std::make_unique<Group<T>>(tiles, width, room));
  }
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    Group<T>& group = *groups[static_cast<size_t>(worker)];
    const Decided memory{group.squared.data(), group.found.data()};
    const int64_t first = task * tiles * TARGETS;
    const int64_t end = std::min(search.rows, first + tiles * TARGETS);
    const int64_t own_tiles = (end - first + TARGETS - 1) / TARGETS;
    for (int64_t tile = 0; tile < own_tiles; ++tile) {
      const T* points[TARGETS];
      double norms[TARGETS];
      for (int64_t r = 0; r < TARGETS; ++r) {
        const int64_t i = tile * TARGETS + r, row = first + i;
        const T* point = search.points + row * width;
        points[r] = row < end && is_finite_row(point, width) ? point : nullptr;
        group.target[static_cast<size_t>(i)] = {points[r], search.to_self ? row : -1};
      }
      pack_targets(points, width, frame, group.centred.data(),
                   group.packed.data() + tile * TARGETS * width, norms);
      for (int64_t r = 0; r < TARGETS; ++r) {
        const int64_t i = tile * TARGETS + r;
        Shortlist<T>& list = group.lists[static_cast<size_t>(i)];
        list.value = group.values.data() + i * room;
        list.place = group.places.data() + i * room;
        // Who is no target finds nothing.
        list.begin(points[r] ? std::numeric_limits<T>::max()
                             : -std::numeric_limits<T>::infinity());
        group.limits[i] = list.limit;
        group.slack[static_cast<size_t>(i)] = slack_of_products<T>(norms[r], frame, width);
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t tile = 0; tile < own_tiles; ++tile) {
        T v[TARGETS][PANEL<T>];
        uint32_t bits[TARGETS];
        uint32_t near = multiply<T>(group.packed.data() + tile * TARGETS * width,
                                    packed.data() + panel * stride, width,
                                    group.limits.data() + tile * TARGETS, v, bits);
        for (; near; near &= near - 1) {
          const int r = __builtin_ctz(near);
          const int64_t i = tile * TARGETS + r;
          Shortlist<T>& list = group.lists[static_cast<size_t>(i)];
          constexpr int L = Vec<T>::L;
          list.take(load(v[r]), bits[r] & ((1u << L) - 1), panel * PANEL<T>);
          list.take(load(v[r] + L), bits[r] >> L, panel * PANEL<T> + L);
          if (!list.is_full(k)) continue;
          list.make_room(wanted, group.target[static_cast<size_t>(i)],
                         group.slack[static_cast<size_t>(i)], memory);
          group.limits[i] = list.limit;
        }
      }
    }
    for (int64_t row = first; row < end; ++row) {
      const auto i = static_cast<size_t>(row - first);
      if (!group.target[i].point) continue;
      group.lists[i].write_nearest(wanted, group.target[i], group.slack[i], memory,
                                   search.self_loops, search.k, search.index + row * search.k);
    }
  });
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

#define GRAPHATTN_NEIGHBOR_PRODUCTS(T)                                                           \
  GRAPHATTN_API int32_t graphattn_nearest_by_products_##T(                                       \
      const T* points, const T* candidates, int64_t rows, int64_t columns, int64_t width,        \
      int64_t k, int32_t to_self, int32_t self_loops, int64_t* index, int32_t threads) {         \
    return guarded([&] {                                                                         \
      find<T>({points, candidates, rows, columns, width, k, to_self != 0, self_loops != 0,       \
               index},                                                                           \
              threads);                                                                          \
    });                                                                                          \
  }

GRAPHATTN_NEIGHBOR_PRODUCTS(float)
GRAPHATTN_NEIGHBOR_PRODUCTS(double)
