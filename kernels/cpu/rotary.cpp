// Features turned by the positions of their tokens, with the bits that operations of torch give.
#include "rotary.h"

#include <algorithm>
#include <cstdint>

#include "interface.h"
#include "precision.h"
#include "rows.h"
#include "tasks.h"

namespace graphattn {
namespace {

// One head of a token, from `x` to `out`, which may be the same. Every product is rounded by
// itself, and so is every sum.
template <class T>
void turn_head(const T* x, const T* cosine, const T* sine, bool is_back, int64_t half, T* products,
               T* out) {
  T *along = products, *across = products + 2 * half;
  for (int64_t d = 0; d < half; ++d) {
    along[d] = x[d] * cosine[d], along[half + d] = x[half + d] * cosine[d];
    across[d] = x[half + d] * sine[d], across[half + d] = x[d] * sine[d];
  }
  __asm__ volatile("" ::: "memory");  // or a product and a sum become one operation
  const int64_t plus = is_back ? 0 : half, minus = half - plus;
  for (int64_t d = 0; d < half; ++d) {
    out[minus + d] = along[minus + d] - across[minus + d];
    out[plus + d] = along[plus + d] + across[plus + d];
  }
}

template <class T>
void turn(const TurnCall& call) {
  constexpr int64_t piece = 64;  // tokens
  const int64_t half = call.width / 2, width = 2 * half;
  const int64_t pieces = (call.tokens + piece - 1) / piece, tasks = call.batch * pieces;
  const int64_t heads = call.heads + call.other_heads;
  const double operations = 3.0 * call.batch * call.tokens * heads * width;
  const int threads =
      worker_count(tasks, threads_worth(operations, static_cast<int>(call.threads)));
  Buffer<T> memory(4 * width * threads);  // of products, and of halves as floats
  parallel_tasks(tasks, threads, [&](int64_t task, int worker) {
    T* products = memory.data() + 4 * width * worker;
    T *room = products + 2 * width, *turned = room + width;
    const int64_t b = task / pieces, first = task % pieces * piece;
    for (int64_t i = first; i < std::min(call.tokens, first + piece); ++i) {
      const int64_t angle = b * call.angle_batch + i * call.angle_token;
      const T* cosine = static_cast<const T*>(call.cosines) + angle;
      const T* sine = static_cast<const T*>(call.sines) + angle;
      for (int64_t n = 0; n < heads; ++n) {
        const bool is_other = n >= call.heads;
        const TokenView &from = is_other ? call.other : call.x;
        const TokenView &to = is_other ? call.other_out : call.out;
        const int64_t h = is_other ? n - call.heads : n;
        const T* x = read_head(from, b, i, h, width, room);
        T* out = is_half<T>(to) ? turned : at<T>(to, b, i, h);
        turn_head(x, cosine, sine, call.is_back != 0, half, products, out);
        if (out == turned) write_head(out, width, to, b, i, h);
      }
    }
  });
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_turn(const graphattn::TurnCall* call, int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::turn<double>(*call) : graphattn::turn<float>(*call);
  });
}
