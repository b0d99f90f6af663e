// What a build of this library is, and entries by which tests reach the parts all kernels share.
#include <algorithm>
#include <cstdint>
#include <ctime>

#include "gelu.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

// y = exp(x) in pieces, as a kernel would: whole vectors, then what is left of one.
template <class T>
void exp_of_array(const T* x, T* y, int64_t count, int threads) {
  constexpr int64_t piece = 4096;
  constexpr int64_t lanes = Vec<T>::L;
  huge(y, count * static_cast<int64_t>(sizeof(T)));
  parallel_tasks((count + piece - 1) / piece, threads, [&](int64_t task, int) {
    const int64_t end = std::min(count, (task + 1) * piece);
    int64_t i = task * piece;
    for (; i + lanes <= end; i += lanes) store(y + i, exp(load(x + i)));
    if (i < end) store_first(y + i, exp(load_first(x + i, end - i)), end - i);
  });
}

// What edges of consensus are computed with: results[0 .. 3] are the GELU, its derivative, the
// softplus and its derivative.
template <class T>
void activations_of_array(const T* x, T* results, int64_t count) {
  constexpr int64_t lanes = Vec<T>::L;
  for (int64_t i = 0; i < count; i += lanes) {
    const int64_t some = std::min(lanes, count - i);
    const vec<T> each = load_first(x + i, some), distribution = normal_distribution(each);
    const vec<T> found[] = {gelu(each), gelu_derivative(each, distribution), softplus(each),
                            softplus_derivative(each)};
    for (int64_t k = 0; k < 4; ++k) store_first(results + k * count + i, found[k], some);
  }
}

// The sum and the largest of one vector: result[0], result[1].
template <class T>
void reduce_vector(const T* x, T* result) {
  result[0] = sum(load(x));
  result[1] = largest(load(x));
}

}  // namespace
}  // namespace graphattn

using namespace graphattn;

// Raised whenever a function changes its arguments or its meaning, here and in library.py: a build
// that is older than the Python files beside it must not be called.
GRAPHATTN_API int32_t graphattn_abi_version() { return 10; }

GRAPHATTN_API const char* graphattn_instruction_set() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "baseline";
#endif
}

GRAPHATTN_API int32_t graphattn_vector_bytes() { return vector_bytes; }

GRAPHATTN_API int32_t graphattn_has_openmp() {
#if defined(_OPENMP) && !defined(GRAPHATTN_STD_THREADS)
  return 1;
#else
  return 0;
#endif
}

GRAPHATTN_API int32_t graphattn_exp_float(const float* x, float* y, int64_t count,
                                          int32_t threads) {
  return guarded([&] { exp_of_array(x, y, count, threads); });
}

GRAPHATTN_API int32_t graphattn_exp_double(const double* x, double* y, int64_t count,
                                           int32_t threads) {
  return guarded([&] { exp_of_array(x, y, count, threads); });
}

GRAPHATTN_API int32_t graphattn_activations_float(const float* x, float* results, int64_t count) {
  return guarded([&] { activations_of_array(x, results, count); });
}

GRAPHATTN_API int32_t graphattn_activations_double(const double* x, double* results,
                                                   int64_t count) {
  return guarded([&] { activations_of_array(x, results, count); });
}

GRAPHATTN_API int32_t graphattn_reduce_float(const float* x, float* result) {
  return guarded([&] { reduce_vector(x, result); });
}

GRAPHATTN_API int32_t graphattn_reduce_double(const double* x, double* result) {
  return guarded([&] { reduce_vector(x, result); });
}

// worker[i]: who did task i, where each takes a while.
GRAPHATTN_API int32_t graphattn_workers(int32_t* worker, int64_t tasks, int32_t threads,
                                        int32_t microseconds) {
  return guarded([&] {
    parallel_tasks(tasks, threads, [&](int64_t task, int by) {
      const timespec pause{0, microseconds * 1000L};
      nanosleep(&pause, nullptr);
      worker[task] = by;
    });
  });
}

// Every task asks for so much memory, and touches its two ends.
GRAPHATTN_API int32_t graphattn_allocate(int64_t bytes, int64_t tasks, int32_t threads) {
  return guarded([&] {
    parallel_tasks(tasks, threads, [&](int64_t task, int) {
      Buffer<char> memory(bytes);
      if (bytes > 0) memory[0] = memory[bytes - 1] = static_cast<char>(task);
    });
  });
}
