// A loop over independent tasks on several threads, and the memory that tasks work in.
//
// Which thread takes which task differs from call to call. Results are the same bits for any number
// of threads where a task writes only what is its own and adds in an order of its own; so there is
// no reduction here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <new>

#if defined(GRAPHATTN_STD_THREADS)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace graphattn {

// ---- After a fork ----

// A forked child has one thread, but its OpenMP runtime believes that the workers of the parent are
// still there, and waits for them for ever. So a child stays on one thread.
inline std::atomic<bool> is_forked_child{false};

inline bool watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { is_forked_child.store(true); });
#endif
  return true;
}

inline const bool forks_are_watched = watch_forks();

// ---- How many threads ----

// The threads that so many multiplications and additions are worth: below about 25 microseconds of
// work each, waking a thread (or waiting for one that other work has displaced) costs more.
inline int threads_worth(double operations, int threads) {
  constexpr double operations_per_thread = 500'000;
  const double worth = operations / operations_per_thread;
  return worth < threads ? std::max(1, static_cast<int>(worth)) : threads;
}

// How many workers `parallel_tasks` has at most: that many pieces of scratch memory are enough.
inline int worker_count(int64_t tasks, int threads) {
#if defined(GRAPHATTN_STD_THREADS) || defined(_OPENMP)
  if (is_forked_child.load(std::memory_order_relaxed)) return 1;
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(tasks, threads)));
#else
  (void)tasks, (void)threads;
  return 1;
#endif
}

// ---- The loop ----

// Who does which task; the first exception is kept, and ends what has not begun.
template <class F>
class TaskQueue {
 public:
  TaskQueue(int64_t tasks, int workers, const F& f) : tasks_(tasks), workers_(workers), f_(f) {}

  void work(int worker) noexcept {
#if defined(GRAPHATTN_STD_THREADS)
    // Every worker has a share, however late it starts: a race between two is always seen.
    for (int64_t task = worker; task < tasks_; task += workers_) run(task, worker);
#else
    // Whoever is free takes the next: tasks, and cores beside other work, differ in speed.
    for (int64_t task = take(); task < tasks_; task = take()) run(task, worker);
#endif
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void run(int64_t task, int worker) noexcept {
    if (stopped_.load(std::memory_order_relaxed)) return;
    try {
      f_(task, worker);
    } catch (...) {
      if (!stopped_.exchange(true)) error_ = std::current_exception();
    }
  }

  const int64_t tasks_;
  const int workers_;
  const F& f_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stopped_{false};
  std::exception_ptr error_;  // written once, read after all workers are done
};

// f(task, worker) for every task in 0 .. tasks - 1, where 0 <= worker < worker_count(tasks,
// threads) and no two calls at a time have the same worker. Throws the first exception of a task.
template <class F>
void parallel_tasks(int64_t tasks, int threads, const F& f) {
  const int workers = worker_count(tasks, threads);
  if (workers == 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task, 0);
    return;
  }
  TaskQueue<F> queue(tasks, workers, f);
#if defined(GRAPHATTN_STD_THREADS)
  // The thread sanitizer knows these; of OpenMP's synchronisation it knows nothing.
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(workers));
  for (int worker = 1; worker < workers; ++worker) {
    others.emplace_back([&queue, worker] { queue.work(worker); });
  }
  queue.work(0);
  for (std::thread& other : others) other.join();
#elif defined(_OPENMP)
#pragma omp parallel num_threads(workers)
  queue.work(omp_get_thread_num());
#endif
  queue.rethrow();
}

// ---- Scratch memory ----

// Uninitialised, aligned to a cache line (and so to every vector), freed at the end of its scope.
// Throws std::bad_alloc. With one per worker: Buffer<T>(worker_count(tasks, threads) * size).
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(allocate(count)) {}
  ~Buffer() { ::operator delete(data_, alignment); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  static constexpr std::align_val_t alignment{64};

  static T* allocate(int64_t count) {
    constexpr int64_t most = std::numeric_limits<ptrdiff_t>::max() / sizeof(T);
    if (count < 0 || count > most) throw std::bad_alloc();
    return static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), alignment));
  }

  T* const data_;
};

}  // namespace graphattn
