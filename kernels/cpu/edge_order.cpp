// A list of edges in the order of its targets, and of their sources: counted into rows, which are
// then sorted one by one.
//
// A row is short and lies together, so all that leaves the cache is one pass over the edges that
// counts and one that places them. Places and tokens are numbers of 32 bits: who asks sees to it
// that they fit.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "interface.h"

namespace graphattn {
namespace {

constexpr int64_t AHEAD = 16;      // edges whose places are fetched before they are written
constexpr int64_t SHORT_ROW = 24;  // edges that are sorted by insertion

// What `found` says: a kind, and what it is about.
constexpr int64_t SOUND = 0, BAD_SOURCE = 1, BAD_TARGET = 2, REPEATED = 3;

// The caller's list; its entries may lie `step` numbers apart.
template <class In>
struct List {
  const In* token;
  int64_t step;

  int64_t operator[](int64_t e) const { return static_cast<int64_t>(token[e * step]); }
};

struct Sorted {
  int32_t *source, *target;  // [edges]
  int64_t* permutation;      // [edges], or null
  int32_t* rowptr;           // [targets + 1]
};

template <class T>
void sort_row(T* first, int64_t count) {
  if (count > SHORT_ROW) {
    if (!std::is_sorted(first, first + count)) std::sort(first, first + count);
    return;
  }
  for (int64_t e = 1; e < count; ++e) {
    const T own = first[e];
    int64_t place = e;
    for (; place > 0 && first[place - 1] > own; --place) first[place] = first[place - 1];
    first[place] = own;
  }
}

// The first edge that is out of range, sources before targets; whether there is none.
template <class In>
bool in_range(const List<In>& source, const List<In>& target, int64_t edges, int64_t sources,
              int64_t targets, int64_t* found) {
  for (int side = 0; side < 2; ++side) {
    const List<In>& list = side ? target : source;
    const uint64_t count = static_cast<uint64_t>(side ? targets : sources);
    for (int64_t e = 0; e < edges; ++e) {
      if (static_cast<uint64_t>(list[e]) < count) continue;
      found[0] = side ? BAD_TARGET : BAD_SOURCE;
      found[1] = e;
      return false;
    }
  }
  return true;
}

// Whether the edges stand in order already, each once.
template <class In>
bool ascends(const List<In>& source, const List<In>& target, int64_t edges) {
  for (int64_t e = 1; e < edges; ++e) {
    const int64_t i = target[e], before = target[e - 1];
    if (i < before || (i == before && source[e] <= source[e - 1])) return false;
  }
  return true;
}

template <class In>
void order(const List<In>& source, const List<In>& target, int64_t edges, int64_t targets,
           const Sorted& out, int64_t* found) {
  // Before a target's edges are placed, rowptr[i + 1] says where they begin, and then where they
  // end: it moves with them.
  std::fill_n(out.rowptr, targets + 1, 0);
  for (int64_t e = 0; e < edges; ++e) {
    const int64_t i = target[e];
    if (i + 2 <= targets) ++out.rowptr[i + 2];
  }
  for (int64_t i = 2; i <= targets; ++i) out.rowptr[i] += out.rowptr[i - 1];
  int32_t* const place = out.rowptr + 1;
  for (int64_t e = 0; e < edges; ++e) {
    if (e + AHEAD < edges) __builtin_prefetch(out.source + place[target[e + AHEAD]], 1);
    const int32_t at = place[target[e]]++;
    out.source[at] = static_cast<int32_t>(source[e]);
    if (out.permutation) out.permutation[at] = e;
  }
  std::vector<uint64_t> both;  // of one row: a source, and the number of its edge below it
  for (int64_t i = 0; i < targets; ++i) {
    const int64_t first = out.rowptr[i], count = out.rowptr[i + 1] - first;
    int32_t* const row = out.source + first;
    std::fill_n(out.target + first, count, static_cast<int32_t>(i));
    if (!out.permutation) {
      sort_row(row, count);
    } else if (!std::is_sorted(row, row + count)) {
      int64_t* const edge = out.permutation + first;
      both.resize(static_cast<size_t>(count));
      for (int64_t e = 0; e < count; ++e) {
        both[e] = static_cast<uint64_t>(row[e]) << 32 | static_cast<uint64_t>(edge[e]);
      }
      sort_row(both.data(), count);
      for (int64_t e = 0; e < count; ++e) {
        row[e] = static_cast<int32_t>(both[e] >> 32);
        edge[e] = static_cast<int64_t>(both[e] & 0xFFFFFFFFu);
      }
    }
    const int32_t* const twice = std::adjacent_find(row, row + count);
    if (twice != row + count) {
      found[0] = REPEATED, found[1] = *twice, found[2] = i;
      return;
    }
  }
}

template <class In>
void sort_edges(const void* source, const void* target, int64_t step, int64_t edges,
                int64_t sources, int64_t targets, const Sorted& out, int64_t* found) {
  const List<In> from{static_cast<const In*>(source), step};
  const List<In> to{static_cast<const In*>(target), step};
  found[0] = SOUND;
  if (!in_range(from, to, edges, sources, targets, found)) return;
  if (!ascends(from, to, edges)) return order(from, to, edges, targets, out, found);
  for (int64_t e = 0; e < edges; ++e) {
    out.source[e] = static_cast<int32_t>(from[e]);
    out.target[e] = static_cast<int32_t>(to[e]);
    if (out.permutation) out.permutation[e] = e;
  }
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

// The edges sorted by target, then source: their ends [edges] twice, and if it is not null the
// number that each had before [edges]. Two entries of the given lists lie `step` numbers apart.
// `rowptr` [targets + 1] is memory to work in. `found` [3]: what is wrong, and the first edge that
// is out of range, or the source and target of one that stands there twice; nothing else may be
// read then.
GRAPHATTN_API int32_t graphattn_sort_edges(const void* source, const void* target, int64_t step,
                                           int64_t edges, int64_t sources, int64_t targets,
                                           int32_t* sorted_source, int32_t* sorted_target,
                                           int64_t* permutation, int32_t* rowptr, int64_t* found,
                                           int32_t is_narrow) {
  return guarded([&] {
    const Sorted out{sorted_source, sorted_target, permutation, rowptr};
    const auto sort = is_narrow ? sort_edges<int32_t> : sort_edges<int64_t>;
    sort(source, target, step, edges, sources, targets, out, found);
  });
}
