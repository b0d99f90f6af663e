// Nearest neighbours in two steps: distances that are known up to rounding propose, exact ones
// decide.
//
// The first are a matrix that is made piece by piece and never kept. A piece is read once, while it
// is still in the cache, and a row keeps what is no larger than the k-th smallest so far and a
// slack: everything that may be among the k smallest.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t ROWS = 16;    // of a task
constexpr int64_t SUMS = 8;     // side by side, whatever the instruction set
constexpr int64_t VECTORS = 4;  // looked through at a time

// Columns `first` .. `first + columns - 1` of a matrix, and what is kept of its rows so far.
template <class T>
struct Piece {
  const T* numbers;  // [rows, columns], rows `stride` apart
  int64_t rows, columns, stride, first, k;
  const T* slack;    // [rows]
  int64_t room;      // at least k and a vector
  T* kept;           // [rows, room]
  int64_t* column;   // [rows, room], ascending
  int64_t* count;    // [rows]; -1 where so many are so near that `room` is too small
  T* limit;          // [rows]: what is larger is not among the smallest; at first the largest number
};

template <class T>
struct Row {
  const Piece<T>& piece;
  const int64_t row;
  T* const kept = piece.kept + row * piece.room;
  int64_t* const column = piece.column + row * piece.room;
  int64_t count = piece.count[row];
  T limit = piece.limit[row];

  // Leaves what is within the slack of the k-th smallest.
  void thin_out(T* scratch) {
    if (count < piece.k) return;
    std::memcpy(scratch, kept, static_cast<size_t>(count) * sizeof(T));
    std::nth_element(scratch, scratch + piece.k - 1, scratch + count);
    limit = scratch[piece.k - 1] + piece.slack[row];
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (!(kept[i] <= limit)) continue;
      kept[left] = kept[i];
      column[left++] = column[i];
    }
    count = left;
  }

  // At most a vector of numbers; whether there was room for them. Without a branch for each of them:
  // which of them stay cannot be foretold.
  bool look_through(const T* numbers, int64_t first, int64_t columns, T* scratch) {
    if (count + columns > piece.room) {
      thin_out(scratch);
      if (count + columns > piece.room) return false;
    }
    for (int64_t j = 0; j < columns; ++j) {
      kept[count] = numbers[j];
      column[count] = first + j;
      count += numbers[j] <= limit;
    }
    return true;
  }

  bool look_through_all(T* scratch) {
    constexpr int64_t L = Vec<T>::L;
    const T* numbers = piece.numbers + row * piece.stride;
    int64_t j = 0;
    for (; j + VECTORS * L <= piece.columns; j += VECTORS * L) {
      vec<T> least = load(numbers + j);
      for (int64_t v = 1; v < VECTORS; ++v) least = minimum(least, load(numbers + j + v * L));
      if (!(least_of(least) <= limit)) continue;
      for (int64_t v = j; v < j + VECTORS * L; v += L) {
        if (!(least_of(load(numbers + v)) <= limit)) continue;
        if (!look_through(numbers + v, piece.first + v, L, scratch)) return false;
      }
    }
    for (; j < piece.columns; j += L) {
      const int64_t some = std::min(L, piece.columns - j);
      if (!look_through(numbers + j, piece.first + j, some, scratch)) return false;
    }
    return true;
  }
};

template <class T>
void keep_smallest(const Piece<T>& piece, bool is_last, int threads) {
  const int64_t tasks = (piece.rows + ROWS - 1) / ROWS;
  threads = threads_worth(static_cast<double>(piece.rows) * piece.columns, threads);
  Buffer<T> memory(worker_count(tasks, threads) * piece.room);
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    T* scratch = memory.data() + worker * piece.room;
    const int64_t end = std::min(piece.rows, (task + 1) * ROWS);
    for (int64_t r = task * ROWS; r < end; ++r) {
      if (piece.count[r] < 0) continue;
      Row<T> row{piece, r};
      if (!row.look_through_all(scratch)) {
        piece.count[r] = -1;
        continue;
      }
      if (is_last) row.thin_out(scratch);
      piece.count[r] = row.count;
      piece.limit[r] = row.limit;
    }
  });
}

// ---- Exact distances ----

// Every build rounds alike, and up to three coordinates are added one after the other as torch and
// numpy do it: so no product is joined with a sum.
#if defined(__clang__)
#define GRAPHATTN_NO_JOINING
#else
#define GRAPHATTN_NO_JOINING __attribute__((optimize("fp-contract=off")))
#endif

template <class T>
GRAPHATTN_NO_JOINING double squared_distance(const T* a, const T* b, int64_t width) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  double sums[SUMS] = {}, rest = 0;
  int64_t c = 0;
  for (; c + SUMS <= width; c += SUMS) {
    for (int64_t s = 0; s < SUMS; ++s) {
      const double gap = static_cast<double>(a[c + s]) - static_cast<double>(b[c + s]);
      sums[s] += gap * gap;
    }
  }
  for (; c < width; ++c) {
    const double gap = static_cast<double>(a[c]) - static_cast<double>(b[c]);
    rest += gap * gap;
  }
  for (int64_t half = SUMS / 2; half > 0; half /= 2) {
    for (int64_t s = 0; s < half; ++s) sums[s] += sums[s + half];
  }
  return sums[0] + rest;
}

struct Neighbor {
  double squared;
  int64_t column;

  bool operator<(const Neighbor& other) const {
    return squared < other.squared || (squared == other.squared && column < other.column);
  }
};

// Which of the columns that rows have kept are the k nearest.
template <class T>
struct Search {
  const T *points, *candidates;  // [rows, width], [columns, width]
  int64_t rows, width;
  int64_t own;  // the column that is the first row itself; the next row's is the next. -1: none is
  bool self_loops;  // whether rows are their own first neighbours, or none at all
  int64_t k, room;
  const int64_t *column, *count;  // [rows, room], [rows]
  int64_t* index;                 // [rows, k]; -1 where there are fewer

  void decide(int64_t row, Neighbor* found) const {
    int64_t near = 0;
    for (int64_t i = 0; i < count[row]; ++i) {
      const int64_t j = column[row * room + i];
      const bool itself = own >= 0 && j == own + row;
      if (itself && !self_loops) continue;
      const double squared = squared_distance(points + row * width, candidates + j * width, width);
      if (!(squared <= std::numeric_limits<double>::max())) continue;
      found[near++] = {itself ? -1 : squared, j};
    }
    const int64_t kept = std::min(k, near);
    std::partial_sort(found, found + kept, found + near);
    for (int64_t i = 0; i < k; ++i) index[row * k + i] = i < kept ? found[i].column : -1;
  }
};

template <class T>
void decide(const Search<T>& search, int threads) {
  const int64_t tasks = (search.rows + ROWS - 1) / ROWS;
  const double work = static_cast<double>(search.rows) * search.k * (search.width + 10);
  threads = threads_worth(work, threads);
  Buffer<Neighbor> memory(worker_count(tasks, threads) * search.room);
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    const int64_t end = std::min(search.rows, (task + 1) * ROWS);
    for (int64_t row = task * ROWS; row < end; ++row) {
      search.decide(row, memory.data() + worker * search.room);
    }
  });
}

// squared[i]: from point `row[i]` to candidate `column[i]`, infinite where that is -1.
template <class T>
void distances_of_pairs(const T* points, const T* candidates, int64_t width, int64_t pairs,
                        const int64_t* row, const int64_t* column, double* squared, int threads) {
  constexpr int64_t piece = 1024;
  const int64_t tasks = (pairs + piece - 1) / piece;
  threads = threads_worth(static_cast<double>(pairs) * (width + 10), threads);
  parallel_tasks(tasks, threads, [&](int64_t task, int) {
    const int64_t end = std::min(pairs, (task + 1) * piece);
    for (int64_t i = task * piece; i < end; ++i) {
      squared[i] = column[i] < 0 ? std::numeric_limits<double>::infinity()
                                 : squared_distance(points + row[i] * width,
                                                    candidates + column[i] * width, width);
    }
  });
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

#define GRAPHATTN_NEIGHBORS(T)                                                                    \
  GRAPHATTN_API int32_t graphattn_keep_smallest_##T(                                              \
      const T* numbers, int64_t rows, int64_t columns, int64_t stride, int64_t first, int64_t k,  \
      const T* slack, int64_t room, T* kept, int64_t* column, int64_t* count, T* limit,           \
      int32_t is_last, int32_t threads) {                                                         \
    return guarded([&] {                                                                          \
      keep_smallest<T>({numbers, rows, columns, stride, first, k, slack, room, kept, column,      \
                        count, limit},                                                            \
                       is_last, threads);                                                         \
    });                                                                                           \
  }                                                                                               \
                                                                                                  \
  GRAPHATTN_API int32_t graphattn_nearest_##T(                                                    \
      const T* points, const T* candidates, int64_t rows, int64_t width, int64_t own,             \
      int32_t self_loops, int64_t k, int64_t room, const int64_t* column, const int64_t* count,   \
      int64_t* index, int32_t threads) {                                                          \
    return guarded([&] {                                                                          \
      decide<T>({points, candidates, rows, width, own, self_loops != 0, k, room, column, count,   \
                 index},                                                                          \
                threads);                                                                         \
    });                                                                                           \
  }                                                                                               \
                                                                                                  \
  GRAPHATTN_API int32_t graphattn_squared_distances_##T(                                          \
      const T* points, const T* candidates, int64_t width, int64_t pairs, const int64_t* row,     \
      const int64_t* column, double* squared, int32_t threads) {                                  \
    return guarded([&] {                                                                          \
      distances_of_pairs<T>(points, candidates, width, pairs, row, column, squared, threads);     \
    });                                                                                           \
  }

GRAPHATTN_NEIGHBORS(float)
GRAPHATTN_NEIGHBORS(double)
