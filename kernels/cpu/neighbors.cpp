// Squared distances of pairs of points, as the searches for neighbours know them: exact_distances.h.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "exact_distances.h"
#include "interface.h"
#include "tasks.h"

namespace graphattn {
namespace {

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
      squared[i] = std::numeric_limits<double>::infinity();
      if (column[i] < 0) continue;
      const int32_t first = 0;
      squared_distances(points + row[i] * width, candidates + column[i] * width, width, 1, &first,
                        squared + i);
    }
  });
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

#define GRAPHATTN_SQUARED_DISTANCES(T)                                                            \
  GRAPHATTN_API int32_t graphattn_squared_distances_##T(                                          \
      const T* points, const T* candidates, int64_t width, int64_t pairs, const int64_t* row,     \
      const int64_t* column, double* squared, int32_t threads) {                                  \
    return guarded([&] {                                                                          \
      distances_of_pairs<T>(points, candidates, width, pairs, row, column, squared, threads);     \
    });                                                                                           \
  }

GRAPHATTN_SQUARED_DISTANCES(float)
GRAPHATTN_SQUARED_DISTANCES(double)
