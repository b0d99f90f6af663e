// The gradients of the sums of a consensus step: every edge is computed again.
//
// Edges go in rounds as in the forward, of a size that does not depend on the number of threads, and
// what they give to their ends is added up in their order. Gradients of the edge network are sums of
// outer products over edges: the blocks of a round are dealt out to a few parts, each of which adds
// up what is its own, and at the end the parts are added in their order. So there are the same bits
// for any number of threads.

#include <algorithm>
#include <vector>

#include "consensus.h"
#include "consensus_block.h"
#include "consensus_walk.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

constexpr int64_t ROUND = 1 << 20;       // numbers that a round's edges give, at most: 4 MB of floats
constexpr int64_t MOST_PARTS = 8;        // of the gradients of the edge network
constexpr int64_t EDGES_OF_PART = 512;   // at least
constexpr int64_t OF_PARTS = 1 << 23;    // numbers of all parts, at most: 32 MB of floats

template <class T>
struct Memory {
  EdgeBlock<T> block;
  EndReader<T> of_hidden, of_states;
  EdgeFeatures<T> features;
  Ends<T> ends;
  std::vector<T> hidden, slope;  // [EDGES, stride]: gelu and its derivative, edge by edge
  std::vector<T> upstream;       // [width, EDGES]: what the gradients of the sums are at an edge
  std::vector<T> along_difference, along_upstream;  // [rank, EDGES]
  std::vector<T> d_rows;         // [2 + rank * width, EDGES]: alpha, beta, rows of Lambda
  std::vector<T> d_hidden;       // [trunks * xi, EDGES]
};

template <class T>
class Backward {
 public:
  Backward(const ConsensusCall& call, const ConsensusGradients& wanted)
      : call_(call), wanted_(wanted), D_(call.width), H_(call.heads), xi_(call.hidden),
        features_(call.trunks * call.hidden), rows_(call.rank * call.width),
        feeds_(call.heads / std::max<int64_t>(1, call.groups)), stride_(whole(features_ + 2 * EDGES<T>)),
        columns_(whole(xi_)), for_ends_(wanted.target_hidden.data != nullptr),
        for_hidden_(for_ends_ || wanted.edge || wanted.edge_weight),
        for_states_(wanted.u.data != nullptr), for_network_(wanted.network.alpha != nullptr) {}

  void run() {
    clear();
    if (H_ == 0) return;
    EdgeWalk walk(call_);
    const double products = 3 * double(rows_ + 2) * double(xi_) * double(H_);
    const int threads =
        threads_worth(products * double(walk.count()), static_cast<int>(call_.threads));
    const int64_t given = for_states_ * H_ * D_ + for_hidden_ * call_.groups * features_;
    const int64_t fitting = std::max<int64_t>(256, ROUND / std::max<int64_t>(1, given));
    const int64_t all = std::max<int64_t>(1, walk.count());
    const int64_t most = call_.kept ? all : call_.round ? call_.round : std::min(all, fitting);
    const int64_t per_head = (2 + rows_) * (columns_ + 1), per_part = H_ * per_head;
    const int64_t parts = std::clamp<int64_t>(
        std::min(walk.count() / EDGES_OF_PART, OF_PARTS / std::max<int64_t>(1, per_part)), 1,
        MOST_PARTS);
    std::vector<Memory<T>> own(static_cast<size_t>(std::max(threads, 1)));
    for (Memory<T>& memory : own) reserve(memory);
    Buffer<T> pulls(for_states_ * most * H_ * D_);
    Buffer<T> d_sums(for_hidden_ * most * call_.groups * features_);
    Buffer<T> totals(for_network_ * parts * per_part);
    std::fill_n(totals.data(), for_network_ * parts * per_part, T(0));
    std::vector<Edge> edges;
    edges.reserve(static_cast<size_t>(most));
    for (walk.next(most, edges); !edges.empty(); walk.next(most, edges)) {
      const int64_t count = static_cast<int64_t>(edges.size());
      const int64_t blocks = (count + EDGES<T> - 1) / EDGES<T>;
      parallel_tasks(call_.groups * parts, threads, [&](int64_t task, int worker) {
        const int64_t group = task / parts, part = task % parts;
        const int64_t last = (part + 1) * blocks / parts;
        T* total = totals.data() + for_network_ * part * per_part;
        for (int64_t block = part * blocks / parts; block < last; ++block) {
          const int64_t e = block * EDGES<T>, size = std::min(EDGES<T>, count - e);
          T* pull = pulls.data() + for_states_ * e * H_ * D_;
          T* d_sum = d_sums.data() + for_hidden_ * e * call_.groups * features_;
          compute(edges, e, size, group, pull, d_sum, total, own[worker]);
        }
      });
      parallel_tasks(H_ + call_.groups + 1, threads, [&](int64_t task, int) {
        const int64_t group = task - H_;
        if (task < H_) {
          if (for_states_) add_up(edges, task, H_, D_, pulls.data(), wanted_.u, wanted_.v, T(-1));
        } else if (group < call_.groups) {
          if (for_ends_) {
            add_up(edges, group, call_.groups, features_, d_sums.data(), wanted_.target_hidden,
                   wanted_.source_hidden, T(1));
          }
          if (wanted_.edge_weight) add_to_edge_weight(edges, group, d_sums.data());
        } else if (wanted_.edge) {
          add_to_edges(edges, d_sums.data());
        }
      });
    }
    if (!for_network_) return;
    parallel_tasks(H_, threads, [&](int64_t h, int) {
      add_parts(h, totals.data() + h * per_head, parts, per_part);
    });
  }

 private:
  // Up to whole pairs of vectors.
  static int64_t whole(int64_t numbers) {
    return (numbers + EDGES<T> - 1) / EDGES<T> * EDGES<T>;
  }

  void reserve(Memory<T>& own) const {
    own.block.reserve(call_.trunks, xi_, call_.rank, D_);
    const auto resize = [](std::vector<T>& x, int64_t size) {
      x.assign(static_cast<size_t>(size), T(0));
    };
    for (auto* x : {&own.hidden, &own.slope}) resize(*x, EDGES<T> * stride_);
    for (auto* x : {&own.along_difference, &own.along_upstream}) {
      resize(*x, call_.rank * EDGES<T>);
    }
    own.features.reserve(call_);
    resize(own.upstream, D_ * EDGES<T>);
    resize(own.d_rows, (2 + rows_) * EDGES<T>);
    resize(own.d_hidden, features_ * EDGES<T>);
  }

  void clear() const {
    const auto zero = [&](const TokenView& view, int64_t tokens, int64_t heads, int64_t width) {
      for (int64_t b = 0; view.data && b < call_.batch; ++b) {
        for (int64_t i = 0; i < tokens; ++i) {
          for (int64_t h = 0; h < heads; ++h) std::fill_n(at<T>(view, b, i, h), width, T(0));
        }
      }
    };
    zero(wanted_.target_hidden, call_.targets, call_.groups, features_);
    zero(wanted_.source_hidden, call_.sources, call_.groups, features_);
    zero(wanted_.u, call_.targets, H_, D_);
    zero(wanted_.v, call_.sources, H_, D_);
    if (wanted_.edge) std::fill_n(static_cast<T*>(wanted_.edge), wanted_.edge_count, T(0));
    if (wanted_.edge_weight) {
      std::fill_n(static_cast<T*>(wanted_.edge_weight),
                  call_.groups * call_.edge_inputs * features_, T(0));
    }
  }

  // What a block of edges gives, for the heads of a group.
  void compute(const std::vector<Edge>& all, int64_t first, int64_t size, int64_t group, T* pulls,
               T* d_sums, T* total, Memory<T>& own) const {
    const Edge* edges = all.data() + first;
    constexpr int64_t L = Vec<T>::L;
    EdgeBlock<T>& block = own.block;
    block.vectors = size > L ? 2 : 1;
    own.of_hidden.read(call_.target_hidden, call_.source_hidden, group, features_, edges, size,
                       own.ends);
    EdgeFeatures<T>& more = own.features;
    if (call_.edge) more.find(call_, edges, size, group);
    by_feature(
        own.ends, own.block.vectors, features_, block.hidden.data(),
        [&](vec<T> a, vec<T> b, int64_t e, int64_t f) __attribute__((always_inline)) {
          vec<T> x = a + b;
          if (call_.edge) x += load(more.rows.data() + e * more.stride + f);
          const vec<T> distribution = normal_distribution(x);
          const vec<T> hidden = x * distribution;
          store(own.hidden.data() + e * stride_ + f, hidden);
          if (for_hidden_) {
            store(own.slope.data() + e * stride_ + f, gelu_derivative(x, distribution));
          }
          return hidden;
        });
    for (int64_t h = group * feeds_; h < (group + 1) * feeds_; ++h) {
      const HeadNetwork<T> network(call_.network, h, xi_, rows_);
      if (const T* kept = kept_of<T>(call_, first / EDGES<T>, h)) {
        block.recall(kept, rows_);
      } else {
        block.find_rows(network, xi_, call_.trunks, rows_);
      }
      block.find_squares(call_.rank, D_);
      find_upstream(edges, size, h, own);
      block.apply(own.upstream.data(), call_.rank, D_, block.pull.data(),
                              own.along_upstream.data());
      if (for_states_) {
        by_edge(block.pull.data(), D_, size, [&](int64_t e, int64_t f, vec<T> x, int64_t count)
                __attribute__((always_inline)) {
          T* to = pulls + (e * H_ + h) * D_ + f;
          count == L ? store(to, x) : store_first(to, x, count);
        });
      }
      if (!for_hidden_ && !for_network_) continue;
      find_differences(edges, size, h, own);
      find_logit_gradients(edges, size, h, own);
      find_row_gradients(own);
      if (for_network_) add_to_network(total + h * (2 + rows_) * (columns_ + 1), size, own);
      if (for_hidden_) find_hidden_gradients(network, h > group * feeds_, own);
    }
    if (!for_hidden_) return;
    by_edge(own.d_hidden.data(), features_, size, [&](int64_t e, int64_t f, vec<T> x, int64_t count)
            __attribute__((always_inline)) {
      const vec<T> found = x * load(own.slope.data() + e * stride_ + f);
      T* to = d_sums + (e * call_.groups + group) * features_ + f;
      count == L ? store(to, found) : store_first(to, found, count);
    });
  }

  // The gradient of a pull: of the sum at the target, and less that at the source where that moves.
  void find_upstream(const Edge* edges, int64_t size, int64_t h, Memory<T>& own) const {
    const TokenView& d_sum = wanted_.d_gradient;
    for (int64_t e = 0; e < EDGES<T>; ++e) {
      const Edge& edge = edges[e < size ? e : 0];
      own.ends.target[e] = at<const T>(d_sum, edge.sample, edge.target, h);
      own.ends.source[e] =
          call_.energy ? at<const T>(d_sum, edge.sample, edge.source, h) : own.ends.target[e];
    }
    if (call_.energy) {
      by_feature(own.ends, own.block.vectors, D_, own.upstream.data(),
                 [](vec<T> a, vec<T> b, int64_t, int64_t) __attribute__((always_inline)) { return a - b; });
    } else {
      by_feature(own.ends, own.block.vectors, D_, own.upstream.data(),
                 [](vec<T> a, vec<T>, int64_t, int64_t) __attribute__((always_inline)) { return a; });
    }
  }

  // The differences that R acts on, and what rows of Lambda make of them.
  void find_differences(const Edge* edges, int64_t size, int64_t h, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    EdgeBlock<T>& block = own.block;
    own.of_states.read(call_.u, call_.v, h, D_, edges, size, own.ends);
    by_feature(own.ends, own.block.vectors, D_, block.difference.data(),
               [](vec<T> a, vec<T> b, int64_t, int64_t) __attribute__((always_inline)) { return a - b; });
    for (int64_t k = 0; k < call_.rank; ++k) {
      for (int v = 0; v < own.block.vectors; ++v) {
        const T* row = block.rows.data() + k * D_ * EDGES<T> + v * L;
        store(own.along_difference.data() + k * EDGES<T> + v * L,
              EdgeBlock<T>::dot(row, block.difference.data() + v * L, D_));
      }
    }
  }

  // Of what alpha and beta are the softplus of.
  void find_logit_gradients(const Edge* edges, int64_t size, int64_t h, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    const EdgeBlock<T>& block = own.block;
    T d_strength[EDGES<T>] = {};
    if (const T* d_degree = static_cast<const T*>(wanted_.d_degree)) {
      const auto of = [&](const Edge& edge, int64_t token) {
        return d_degree[(edge.sample * call_.targets + token) * H_ + h];
      };
      for (int64_t e = 0; e < size; ++e) {
        d_strength[e] = of(edges[e], edges[e].target);
        if (call_.energy) d_strength[e] += of(edges[e], edges[e].source);
      }
    }
    const T share = T(1) / static_cast<T>(call_.rank);
    for (int v = 0; v < own.block.vectors; ++v) {
      const vec<T> more = load(d_strength + v * L);
      const vec<T> of_alpha = EdgeBlock<T>::dot(block.difference.data() + v * L,
                                                own.upstream.data() + v * L, D_);
      vec<T> of_beta{};
      for (int64_t k = 0; k < call_.rank; ++k) {
        const int64_t at = k * EDGES<T> + v * L;
        of_beta += load(own.along_difference.data() + at) * load(own.along_upstream.data() + at) *
                   load(block.per_square.data() + at);
      }
      T* to = own.d_rows.data() + v * L;
      store(to, (of_alpha + more) * softplus_derivative(load(block.alpha_logit + v * L)));
      store(to + EDGES<T>,
            (of_beta * share + more) * softplus_derivative(load(block.beta_logit + v * L)));
    }
  }

  // (beta / r) [(l . e) d + (l . d) e - 2 (l . d) (l . e) l / |l|^2] / |l|^2 for every raw row l.
  void find_row_gradients(Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    const EdgeBlock<T>& block = own.block;
    T* d_rows = own.d_rows.data() + 2 * EDGES<T>;
    if (D_ == 1) {  // 0 then, of which rounding would make 1 / |l| times its unit
      std::fill_n(d_rows, rows_ * EDGES<T>, T(0));
      return;
    }
    for (int v = 0; v < own.block.vectors; ++v) {
      const vec<T> of_beta = load(block.beta + v * L) * (T(1) / static_cast<T>(call_.rank));
      for (int64_t k = 0; k < call_.rank; ++k) {
        const int64_t of_row = k * EDGES<T> + v * L;
        const vec<T> per_square = load(block.per_square.data() + of_row);
        const vec<T> scale = of_beta * per_square / load(block.divisor.data() + of_row);
        const vec<T> along_upstream = load(own.along_upstream.data() + of_row);
        const vec<T> by_upstream = scale * load(own.along_difference.data() + of_row);
        const vec<T> by_difference = scale * along_upstream;
        const vec<T> by_row = T(-2) * (by_upstream * along_upstream * per_square);
        for (int64_t d = 0; d < D_; ++d) {
          const int64_t at = d * EDGES<T> + v * L, in_rows = k * D_ * EDGES<T> + at;
          store(d_rows + in_rows, by_row * load(block.rows.data() + in_rows) +
                                      by_difference * load(block.difference.data() + at) +
                                      by_upstream * load(own.upstream.data() + at));
        }
      }
    }
  }

  // Adds to the gradients of one head's second layer: 2 + rows of them as `outer_product` has a
  // total, then biases.
  void add_to_network(T* total, int64_t size, Memory<T>& own) const {
    const int64_t panel = (2 + rows_) * EDGES<T>;
    const auto add_rows = [&](int64_t first, int64_t count, int64_t trunk) {
      outer_product(own.d_rows.data() + first * EDGES<T>, count, own.hidden.data() + trunk * xi_,
                    stride_, size, total + first * EDGES<T>, panel, columns_);
    };
    if (call_.trunks == 1) {
      add_rows(0, 2 + rows_, 0);
    } else {
      add_rows(0, 1, 0), add_rows(1, 1, 1), add_rows(2, rows_, 2);
    }
    const T* x = own.d_rows.data();
    T* biases = total + (2 + rows_) * columns_;
    const vec<T> lane = lane_numbers<T>();
    for (int64_t r = 0; r < 2 + rows_; ++r) {
      vec<T> sums{};
      for (int64_t e = 0; e < size; e += Vec<T>::L) {
        const auto is_there = lane < broadcast(static_cast<T>(size - e));
        sums += is_there ? load(x + r * EDGES<T> + e) : vec<T>{};
      }
      biases[r] += sum(sums);
    }
  }

  void find_hidden_gradients(const HeadNetwork<T>& network, bool again, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    const int64_t third = call_.trunks == 1 ? 0 : xi_ * EDGES<T>;
    T* to = own.d_hidden.data();
    const T* x = own.d_rows.data();
    const auto product =
        own.block.vectors == 2 ? backward_product<T, 2> : backward_product<T, 1>;
    product(network.shear, rows_, xi_, x + 2 * EDGES<T>, again, to + 2 * third);
    for (int v = 0; v < own.block.vectors; ++v) {
      const vec<T> of_alpha = load(x + v * L), of_beta = load(x + EDGES<T> + v * L);
      for (int64_t k = 0; k < xi_; ++k) {
        T* first = to + k * EDGES<T> + v * L;
        T* second = first + third;
        const vec<T> a = network.alpha[k] * of_alpha, b = network.beta[k] * of_beta;
        if (third == 0) {
          store(first, load(first) + (a + b));
        } else {
          store(first, again ? load(first) + a : a);
          store(second, again ? load(second) + b : b);
        }
      }
    }
  }

  // Adds what edges give, [edges, heads, width], at their two ends.
  void add_up(const std::vector<Edge>& edges, int64_t h, int64_t heads, int64_t width, const T* given,
              const TokenView& of_targets, const TokenView& of_sources, T sign) const {
    const T* from = given + h * width;
    for (const Edge& edge : edges) {
      add<T, 0>(at<T>(of_targets, edge.sample, edge.target, h), T(1), from, width);
      add<T, 0>(at<T>(of_sources, edge.sample, edge.source, h), sign, from, width);
      from += heads * width;
    }
  }

  // Adds to the gradients of what edges have; samples may share it.
  void add_to_edges(const std::vector<Edge>& edges, const T* d_sums) const {
    const int64_t all = call_.groups * features_;
    for (const Edge& edge : edges) {
      T* to = static_cast<T*>(wanted_.edge) + edge.sample * call_.edge_batch;
      if (!call_.edge_weight) {
        add<T, 0>(to + edge.place * all, T(1), d_sums, all);
      } else {
        to += edge.place * call_.edge_inputs;
        for (int64_t g = 0; g < call_.groups; ++g) {
          const T* weight = EdgeFeatures<T>::weight(call_, g);
          for (int64_t q = 0; q < call_.edge_inputs; ++q) {
            to[q] += dot<T, 0>(weight + q * features_, d_sums + g * features_, features_);
          }
        }
      }
      d_sums += all;
    }
  }

  void add_to_edge_weight(const std::vector<Edge>& edges, int64_t group, const T* d_sums) const {
    const int64_t size = call_.edge_inputs * features_;
    T* to = static_cast<T*>(wanted_.edge_weight) + group * size;
    d_sums += group * features_;
    for (const Edge& edge : edges) {
      const T* numbers = EdgeFeatures<T>::numbers(call_, edge);
      for (int64_t q = 0; q < call_.edge_inputs; ++q) {
        add<T, 0>(to + q * features_, numbers[q], d_sums, features_);
      }
      d_sums += call_.groups * features_;
    }
  }

  // The gradients of one head's second layer, from those of all parts.
  void add_parts(int64_t h, const T* total, int64_t parts, int64_t per_part) const {
    const ConsensusNetwork& to = wanted_.network;
    const auto add_all = [&](const T* first, int64_t count, T* sums) {
      std::copy_n(first, count, sums);
      for (int64_t p = 1; p < parts; ++p) add<T, 0>(sums, T(1), first + p * per_part, count);
    };
    for (int64_t r = 0; r < 2 + rows_; ++r) {
      T* row = static_cast<T*>(r == 0 ? to.alpha : r == 1 ? to.beta : to.shear);
      row += (r < 2 ? h : h * rows_ + r - 2) * xi_;
      for (int64_t k = 0; k < xi_; k += EDGES<T>) {
        add_all(total + k * (2 + rows_) + r * EDGES<T>, std::min(EDGES<T>, xi_ - k), row + k);
      }
    }
    const T* biases = total + (2 + rows_) * columns_;
    add_all(biases, 1, static_cast<T*>(to.alpha_bias) + h);
    add_all(biases + 1, 1, static_cast<T*>(to.beta_bias) + h);
    add_all(biases + 2, rows_, static_cast<T*>(to.shear_bias) + h * rows_);
  }

  const ConsensusCall& call_;
  const ConsensusGradients& wanted_;
  const int64_t D_, H_, xi_;
  const int64_t features_;  // of a hidden vector
  const int64_t rows_;      // of Lambda, times features
  const int64_t feeds_;     // heads that a group's hidden vectors feed
  const int64_t stride_;    // numbers between two edges' hidden vectors
  const int64_t columns_;   // xi, rounded up to whole pairs of vectors
  const bool for_ends_;     // whether gradients of hidden vectors of tokens are wanted;
  const bool for_hidden_;   // or of edges
  const bool for_states_, for_network_;
};

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_consensus_backward(const graphattn::ConsensusCall* call,
                                                   const graphattn::ConsensusGradients* wanted,
                                                   int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::Backward<double>(*call, *wanted).run()
              : graphattn::Backward<float>(*call, *wanted).run();
  });
}
