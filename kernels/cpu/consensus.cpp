// The sums of a consensus step: for every token, what the matrices of its edges make of the
// differences along them, and the sum of alpha + beta.
//
// Edges go in rounds. In each, blocks of edges are computed by any thread, and then what they give
// is added up at their ends, head by head, in the order of the edges: results have the same bits for
// any number of threads, and a sample has those that it has alone.

#include "consensus.h"

#include <algorithm>
#include <vector>

#include "consensus_block.h"
#include "consensus_walk.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t ROUND = 1 << 18;  // numbers that a round's edges give, at most: 1 MB of floats
constexpr int64_t TASK = 128;       // edges

template <class T>
struct Memory {
  EdgeBlock<T> block;
  EndReader<T> of_hidden, of_states;
  EdgeFeatures<T> features;
  Ends<T> ends;
};

template <class T>
class Consensus {
 public:
  explicit Consensus(const ConsensusCall& call)
      : call_(call), rows_(call.rank * call.width), feeds_(call.heads / std::max<int64_t>(1, call.groups)) {}

  void run() {
    const int64_t D = call_.width, H = call_.heads;
    clear();
    if (H == 0) return;
    EdgeWalk walk(call_);
    const double products = double(rows_ + 2) * double(call_.hidden) * double(H);
    const int threads =
        threads_worth(products * double(walk.count()), static_cast<int>(call_.threads));
    const int64_t fitting = ROUND * std::max(2, threads) / 2 / std::max<int64_t>(1, H * D);
    const int64_t most =
        call_.kept    ? std::max<int64_t>(1, walk.count())
        : call_.round ? call_.round
                      : std::max(TASK, std::min(walk.count(), fitting));
    std::vector<Memory<T>> own(static_cast<size_t>(std::max(threads, 1)));
    for (Memory<T>& memory : own) {
      memory.block.reserve(call_.trunks, call_.hidden, call_.rank, D);
      memory.features.reserve(call_);
    }
    Buffer<T> pulls(most * H * D), strengths(call_.degree ? most * H : 0);
    std::vector<Edge> edges;
    edges.reserve(static_cast<size_t>(most));
    for (walk.next(most, edges); !edges.empty(); walk.next(most, edges)) {
      const int64_t count = static_cast<int64_t>(edges.size());
      const int64_t parts = (count + TASK - 1) / TASK;
      parallel_tasks(call_.groups * parts, threads, [&](int64_t task, int worker) {
        const int64_t group = task / parts, part = task % parts;
        const int64_t last = std::min(count, (part + 1) * TASK);
        for (int64_t e = part * TASK; e < last; e += EDGES<T>) {
          const int64_t size = std::min(EDGES<T>, last - e);
          T* strength = call_.degree ? strengths.data() + e * H : nullptr;
          compute(edges, e, size, group, pulls.data() + e * H * D, strength, own[worker]);
        }
      });
      parallel_tasks(H, threads, [&](int64_t h, int) {
        add_up(edges, h, pulls.data(), strengths.data());
      });
    }
  }

 private:
  void clear() const {
    for (int64_t b = 0; b < call_.batch; ++b) {
      for (int64_t i = 0; i < call_.targets; ++i) {
        for (int64_t h = 0; h < call_.heads; ++h) {
          std::fill_n(at<T>(call_.gradient, b, i, h), call_.width, T(0));
        }
      }
    }
    if (call_.degree) {
      std::fill_n(static_cast<T*>(call_.degree), call_.batch * call_.targets * call_.heads, T(0));
    }
  }

  // What a block of edges gives, for the heads of a group.
  void compute(const std::vector<Edge>& all, int64_t first, int64_t size, int64_t group, T* pulls,
               T* strengths, Memory<T>& own) const {
    const Edge* edges = all.data() + first;
    const int64_t xi = call_.hidden, D = call_.width, H = call_.heads;
    EdgeBlock<T>& block = own.block;
    block.vectors = size > Vec<T>::L ? 2 : 1;
    own.of_hidden.read(call_.target_hidden, call_.source_hidden, group, call_.trunks * xi, edges,
                       size, own.ends);
    EdgeFeatures<T>& more = own.features;
    if (call_.edge) more.find(call_, edges, size, group);
    by_feature(own.ends, block.vectors, call_.trunks * xi, block.hidden.data(),
               [&](vec<T> a, vec<T> b, int64_t e, int64_t f) __attribute__((always_inline)) {
                 vec<T> x = a + b;
                 if (call_.edge) x += load(more.rows.data() + e * more.stride + f);
                 return gelu(x);
               });
    for (int64_t h = group * feeds_; h < (group + 1) * feeds_; ++h) {
      const HeadNetwork<T> network(call_.network, h, xi, rows_);
      block.find_rows(network, xi, call_.trunks, rows_);
      if (T* kept = kept_of<T>(call_, first / EDGES<T>, h)) block.keep(kept, rows_);
      block.find_squares(call_.rank, D);
      own.of_states.read(call_.u, call_.v, h, D, edges, size, own.ends);
      by_feature(own.ends, block.vectors, D, block.difference.data(),
                 [](vec<T> a, vec<T> b, int64_t, int64_t) __attribute__((always_inline)) { return a - b; });
      block.apply(block.difference.data(), call_.rank, D, block.pull.data());
      by_edge(block.pull.data(), D, size, [&](int64_t e, int64_t f, vec<T> x, int64_t count)
              __attribute__((always_inline)) {
        T* to = pulls + (e * H + h) * D + f;
        count == Vec<T>::L ? store(to, x) : store_first(to, x, count);
      });
      for (int64_t e = 0; strengths && e < size; ++e) {
        strengths[e * H + h] = block.alpha[e] + block.beta[e];
      }
    }
  }

  void add_up(const std::vector<Edge>& edges, int64_t h, const T* pulls, const T* strengths) const {
    const int64_t D = call_.width, H = call_.heads, N = call_.targets;
    T* degree = static_cast<T*>(call_.degree);
    const T* pull = pulls + h * D;
    const T* strength = strengths + h;
    for (const Edge& edge : edges) {
      add<T, 0>(at<T>(call_.gradient, edge.sample, edge.target, h), T(1), pull, D);
      if (degree) degree[(edge.sample * N + edge.target) * H + h] += *strength;
      if (call_.energy) {
        add<T, 0>(at<T>(call_.gradient, edge.sample, edge.source, h), T(-1), pull, D);
        if (degree) degree[(edge.sample * N + edge.source) * H + h] += *strength;
      }
      pull += H * D, strength += H;
    }
  }

  const ConsensusCall& call_;
  const int64_t rows_;   // of Lambda, times features
  const int64_t feeds_;  // heads that a group's hidden vectors feed
};

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_consensus(const graphattn::ConsensusCall* call, int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::Consensus<double>(*call).run()
              : graphattn::Consensus<float>(*call).run();
  });
}
