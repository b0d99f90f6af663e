// What every function of the C interface is written with.
//
// Python loads the library by ctypes, so a function takes numbers and pointers, and returns a
// status: an exception that left C++ would end the process. What the functions are given has been
// checked in Python.
#pragma once

#include <cstdint>
#include <new>

// Everything else is compiled with hidden visibility.
#define GRAPHATTN_API extern "C" __attribute__((visibility("default")))

namespace graphattn {

// kernels/cpu/library.py (`check`) makes exceptions of these.
enum Status : int32_t { done = 0, out_of_memory = 1, failed = 2 };

// Calls f() and turns what it throws into a status.
template <class F>
int32_t guarded(const F& f) noexcept {
  try {
    f();
    return done;
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  } catch (...) {
    return failed;
  }
}

}  // namespace graphattn
