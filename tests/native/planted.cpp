// What the sanitizers must find: they are trusted only where they do (sanitizers.py).
#include <cstdint>

#include "interface.h"
#include "tasks.h"

using namespace graphattn;

// One number past the end is read and written.
GRAPHATTN_API int32_t planted_address() {
  return guarded([] {
    Buffer<float> numbers(16);
    volatile int64_t last = 16;
    numbers[last] = 1.0f;
  });
}

// A signed sum overflows.
GRAPHATTN_API int32_t planted_behaviour() {
  volatile int32_t largest = INT32_MAX;
  volatile int32_t more = largest + 1;
  return more == 0;
}

// Every task adds to the same number.
GRAPHATTN_API int32_t planted_thread() {
  return guarded([] {
    Buffer<int64_t> shared(1);
    shared[0] = 0;
    parallel_tasks(2, 2, [&](int64_t task, int) { shared[0] += task; });
  });
}
