// A step of generation: the newest token of every text moves towards those that a cache holds.
//
// The tokens of a row stand in the lanes of vectors, the oldest first, and are summed up in an order
// that depends on how many there are alone: results have the same bits for any number of threads,
// wherever in a ring the tokens stand, and whatever else is in the call.

#include "consensus_steps.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "consensus_block.h"
#include "few_rows.h"
#include "interface.h"
#include "simd.h"
#include "tasks.h"

namespace graphattn {
namespace {

// One group's part of a first layer: weight [features, inputs], bias [features] or null.
template <class T>
void apply_layer(const T* weight, const T* bias, const T* token, int64_t inputs, int64_t features,
                 T* to) {
  linear_map<T, AS_COMPUTED>(weight, bias, token, 1, inputs, features, 0, features, to);
}

// Of tokens [texts, groups, inputs]: out [texts, groups, features].
template <class T>
void apply_layers(const T* token, const T* weight, const T* bias, int64_t texts, int64_t groups,
                  int64_t inputs, int64_t features, T* out) {
  for (int64_t i = 0; i < texts * groups; ++i) {
    const int64_t g = i % groups;
    apply_layer(weight + g * features * inputs, bias ? bias + g * features : nullptr,
                token + i * inputs, inputs, features, out + i * features);
  }
}

// The memory of a thread.
template <class T>
struct Memory {
  std::vector<int64_t> places;  // of the tokens that a text's newest one sees
  EdgeBlock<T> block;
  std::vector<T> target_hidden, fresh;  // of the newest token: trunks * hidden
  std::vector<T> targets;               // [heads of a group, width]: what is compared
  std::vector<T> room;                  // [EDGES, features]: of halves
  std::vector<T> sums;                  // [heads of a group, width, EDGES]
  std::vector<T> strengths;             // [heads of a group, EDGES]
  std::vector<T> row;                   // [width, EDGES]
  Ends<T> ends;
};

template <class T>
class Steps {
 public:
  explicit Steps(const ConsensusStepsCall& call)
      : call_(call), features_(call.trunks * call.hidden), rows_(call.rank * call.width),
        feeds_(call.heads / call.groups) {}

  void reserve(Memory<T>& own) const {
    own.block.reserve(call_.trunks, call_.hidden, call_.rank, call_.width);
    const auto resize = [](std::vector<T>& x, int64_t size) {
      x.resize(static_cast<size_t>(size));
    };
    const int64_t most = std::max({features_, call_.width, call_.inputs});
    resize(own.target_hidden, features_);
    resize(own.fresh, 2 * most);
    resize(own.targets, feeds_ * call_.width);
    resize(own.room, EDGES<T> * most);
    resize(own.sums, feeds_ * call_.width * EDGES<T>);
    resize(own.strengths, feeds_ * EDGES<T>);
    resize(own.row, call_.width * EDGES<T>);
  }

  // The row of a text, for the heads of a group.
  void run(int64_t b, int64_t group, Memory<T>& own) const {
    const int64_t first = group * feeds_, D = call_.width;
    const int64_t newest = place(call_.held - 1);
    find_hidden(b, group, newest, own);
    T* fresh = own.fresh.data();
    for (int64_t h = first; h < first + feeds_; ++h) {
      const T* state = read_head(call_.new_state, b, 0, h, D, fresh);
      write_head(state, D, call_.state, b, newest, h);
      const T* compared = read_head(call_.compared, b, 0, h, D, fresh);
      std::copy_n(compared, D, own.targets.data() + (h - first) * D);
    }
    list_tokens(b, own);
    std::fill(own.sums.begin(), own.sums.end(), T(0));
    std::fill(own.strengths.begin(), own.strengths.end(), T(0));
    const int64_t size = static_cast<int64_t>(own.places.size());
    for (int64_t j = 0; j < size; j += EDGES<T>) {
      const int64_t count = std::min(EDGES<T>, size - j);
      add_block(b, group, j, count, own);
    }
    for (int64_t h = first; h < first + feeds_; ++h) finish(b, h, h - first, own);
  }

 private:
  int64_t place(int64_t token) const {
    const int64_t at = call_.first + token;
    return at < call_.room ? at : at - call_.room;
  }

  // Padding sees nothing, and is seen by nobody.
  void list_tokens(int64_t b, Memory<T>& own) const {
    const uint8_t* valid = call_.valid ? call_.valid + b * call_.room : nullptr;
    own.places.clear();
    if (valid && !valid[place(call_.held - 1)]) return;
    for (int64_t j = 0; j < call_.held; ++j) {
      if (!valid || valid[place(j)]) own.places.push_back(place(j));
    }
  }

  // The hidden vectors of the newest token, as a target, and as a source into the cache.
  void find_hidden(int64_t b, int64_t group, int64_t newest, Memory<T>& own) const {
    T *fresh = own.fresh.data(), *target = own.target_hidden.data();
    if (call_.target_hidden.data) {
      const T* given = read_head(call_.target_hidden, b, 0, group, features_, fresh);
      std::copy_n(given, features_, target);
      given = read_head(call_.new_hidden, b, 0, group, features_, fresh);
      write_head(given, features_, call_.hidden_vectors, b, newest, group);
      return;
    }
    const T* token = read_head(call_.token, b, 0, group, call_.inputs, own.room.data());
    apply(call_.target_weight, call_.target_bias, group, token, target);
    apply(call_.source_weight, call_.source_bias, group, token, fresh);
    write_head(fresh, features_, call_.hidden_vectors, b, newest, group);
  }

  void apply(const void* all, const void* biases, int64_t group, const T* token, T* to) const {
    const T* weight = static_cast<const T*>(all) + group * features_ * call_.inputs;
    const T* bias = biases ? static_cast<const T*>(biases) + group * features_ : nullptr;
    apply_layer(weight, bias, token, call_.inputs, features_, to);
  }

  // Where the numbers of some cached tokens lie, or as floats in `room`.
  void find_sources(const TokenView& view, int64_t b, int64_t head, int64_t width, int64_t j,
                    int64_t count, Memory<T>& own) const {
    for (int64_t e = 0; e < count; ++e) {
      own.ends.source[e] =
          read_head(view, b, own.places[j + e], head, width, own.room.data() + e * width);
    }
    for (int64_t e = count; e < EDGES<T>; ++e) own.ends.source[e] = own.ends.source[0];
  }

  // Adds what the tokens j .. j + count - 1 of the list pull with.
  void add_block(int64_t b, int64_t group, int64_t j, int64_t count, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    const int64_t xi = call_.hidden, D = call_.width;
    EdgeBlock<T>& block = own.block;
    block.vectors = count > L ? 2 : 1;
    find_sources(call_.hidden_vectors, b, group, features_, j, count, own);
    std::fill_n(own.ends.target, EDGES<T>, own.target_hidden.data());
    by_feature(own.ends, own.block.vectors, features_, block.hidden.data(),
               [](vec<T> a, vec<T> b, int64_t, int64_t) __attribute__((always_inline)) { return gelu(a + b); });
    for (int64_t k = 0; k < feeds_; ++k) {
      const int64_t h = group * feeds_ + k;
      const HeadNetwork<T> network(call_.network, h, xi, rows_);
      block.find_rows(network, xi, call_.trunks, rows_);
      block.find_squares(call_.rank, D);
      find_sources(call_.state, b, h, D, j, count, own);
      std::fill_n(own.ends.target, EDGES<T>, own.targets.data() + k * D);
      by_feature(own.ends, block.vectors, D, block.difference.data(),
                 [](vec<T> a, vec<T> b, int64_t, int64_t) __attribute__((always_inline)) { return a - b; });
      block.apply(block.difference.data(), call_.rank, D, block.pull.data());
      const vec<T> lane = lane_numbers<T>();
      for (int v = 0; v < own.block.vectors; ++v) {
        const auto is_there = lane < broadcast(static_cast<T>(count - v * L));
        for (int64_t d = 0; d < D; ++d) {
          T* sum = own.sums.data() + (k * D + d) * EDGES<T> + v * L;
          const vec<T> pull = load(block.pull.data() + d * EDGES<T> + v * L);
          store(sum, load(sum) + (is_there ? pull : vec<T>{}));
        }
        T* strength = own.strengths.data() + k * EDGES<T> + v * L;
        const vec<T> both = load(block.alpha + v * L) + load(block.beta + v * L);
        store(strength, load(strength) + (is_there ? both : vec<T>{}));
      }
    }
  }

  // u' of one head.
  void finish(int64_t b, int64_t h, int64_t k, Memory<T>& own) const {
    constexpr int64_t L = Vec<T>::L;
    const int64_t D = call_.width;
    const auto whole = [](const T* x) { return sum(load(x) + load(x + L)); };
    T step = T(call_.same_step);
    if (call_.is_automatic) {
      const T degree = whole(own.strengths.data() + k * EDGES<T>);
      step = degree < 256 * std::numeric_limits<T>::min() ? T(0) : T(1) / degree;
    } else if (call_.step) {
      step = static_cast<const T*>(call_.step)[h];
    }
    const T* moving = read_head(call_.moving, b, 0, h, D, own.fresh.data());
    T* moved = own.row.data();
    for (int64_t d = 0; d < D; ++d) {
      moved[d] = moving[d] - step * whole(own.sums.data() + (k * D + d) * EDGES<T>);
    }
    write_head(moved, D, call_.out, b, 0, h);
  }

  const ConsensusStepsCall& call_;
  const int64_t features_;  // of a hidden vector
  const int64_t rows_;      // of Lambda, times features
  const int64_t feeds_;     // heads that a group's hidden vectors feed
};

// Which of the newest tokens are real, before any thread reads it.
void note_valid(const ConsensusStepsCall& call) {
  if (!call.valid) return;
  const int64_t newest = (call.first + call.held - 1) % call.room;
  for (int64_t b = 0; b < call.texts; ++b) {
    call.valid[b * call.room + newest] =
        call.new_valid ? call.new_valid[b * call.new_valid_step] : uint8_t(1);
  }
}

template <class T>
void run(const ConsensusStepsCall& call) {
  note_valid(call);
  const Steps<T> steps(call);
  const double products = double(call.rank * call.width + 2) * double(call.hidden);
  const double edges = double(call.texts) * double(call.held) * double(call.heads);
  const int threads = threads_worth(products * edges, static_cast<int>(call.threads));
  std::vector<Memory<T>> own(static_cast<size_t>(std::max(threads, 1)));
  for (Memory<T>& memory : own) steps.reserve(memory);
  parallel_tasks(call.texts * call.groups, threads, [&](int64_t task, int worker) {
    steps.run(task / call.groups, task % call.groups, own[worker]);
  });
}

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_consensus_steps(const graphattn::ConsensusStepsCall* call,
                                                int32_t is_double) {
  return graphattn::guarded([&] {
    is_double ? graphattn::run<double>(*call) : graphattn::run<float>(*call);
  });
}

// What a step makes of tokens by a first layer: the same bits, for steps that go another way.
GRAPHATTN_API int32_t graphattn_first_layer(const void* token, const void* weight, const void* bias,
                                            int64_t texts, int64_t groups, int64_t inputs,
                                            int64_t features, void* out, int32_t is_double) {
  return graphattn::guarded([&] {
    const auto run = [&](auto kind) {
      using T = decltype(kind);
      graphattn::apply_layers(static_cast<const T*>(token), static_cast<const T*>(weight),
                              static_cast<const T*>(bias), texts, groups, inputs, features,
                              static_cast<T*>(out));
    };
    is_double ? run(double()) : run(float());
  });
}
