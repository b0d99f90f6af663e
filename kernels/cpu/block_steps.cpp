// A step of a transformer block: the newest token of every text, through norms, attention to a cache
// and the perceptron.
//
// A token's numbers have the same bits whatever other texts are in the call, and for any number of
// threads. Half precision is read and written as such, and everything between is in float.

#include "block_steps.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "few_rows.h"
#include "gelu.h"
#include "interface.h"

GRAPHATTN_API int32_t graphattn_attention_steps(const graphattn::StepsCall* call, int32_t is_double);

namespace graphattn {
namespace {

template <class T, int64_t kind>
class BlockStep {
  using Read = Weights<T, kind>;
  using Number = typename Read::Number;

 public:
  explicit BlockStep(const BlockStepCall& call)
      : call_(call), rows_(call.rows), dim_(call.dim), tokens_(rows_ * dim_), normed_(rows_ * dim_),
        hidden_(rows_ * call.hidden), of_weight_(Read::as_computed ? 0 : dim_),
        of_bias_(Read::as_computed ? 0 : dim_) {}

  int32_t run() {
    read(call_.x, tokens_.data());
    if (call_.attention) {
      if (const int32_t status = attend()) return status;
    } else {
      read(call_.mixed, normed_.data());
      add(normed_.data());
    }
    normalize(call_.mlp_norm);
    map(normed_.data(), dim_, {{call_.up, call_.hidden, hidden_.data()}}, true);
    map(hidden_.data(), call_.hidden, {{call_.down, dim_, normed_.data()}});
    add(normed_.data());
    write();
    return done;
  }

 private:
  // The tokens move by attention between them and what the cache has of them.
  int32_t attend() {
    StepsCall step = *call_.attention;
    const int64_t of_keys = step.kv_heads * step.width, of_values = step.kv_heads * step.value_width;
    Buffer<T> query(rows_ * dim_), key(rows_ * of_keys), value(rows_ * of_values),
        out(rows_ * dim_);
    normalize(call_.mixer_norm);
    map(normed_.data(), dim_,
        {{call_.query, dim_, query.data()},
         {call_.key, of_keys, key.data()},
         {call_.value, call_.values_are_keys ? 0 : of_values, value.data()}});
    const auto found = [&](const LinearMap& by, Buffer<T>& x) {
      return by.weight ? x.data() : normed_.data();
    };
    step.query = heads(found(call_.query, query), step.heads, step.width);
    step.new_key = heads(found(call_.key, key), step.kv_heads, step.width);
    step.new_value = TokenView{};
    if (!call_.values_are_keys) {
      step.new_value = heads(found(call_.value, value), step.kv_heads, step.value_width);
    }
    step.out = heads(out.data(), step.heads, step.value_width);
    if (const int32_t status = graphattn_attention_steps(&step, sizeof(T) == sizeof(double))) {
      return status;
    }
    map(out.data(), dim_, {{call_.output, dim_, normed_.data()}});
    add(normed_.data());
    return done;
  }

  static TokenView heads(T* x, int64_t count, int64_t width) {
    return {x, count * width, count * width, width, AS_COMPUTED};
  }

  struct Target {
    const LinearMap& by;
    int64_t outputs;
    T* out;
  };

  // Maps of x [rows, inputs]; those without a weight are left out.
  void map(const T* x, int64_t inputs, std::initializer_list<Target> targets,
           bool activates = false) const {
    int64_t outputs = 0;
    for (const Target& target : targets) outputs += target.by.weight ? target.outputs : 0;
    // Reading a number of a weight takes the time of several products.
    const int threads =
        threads_worth(8.0 * double(inputs) * double(outputs), static_cast<int>(call_.threads));
    const int64_t parts = threads > 1 ? 4 * threads : 1, size = (outputs + parts - 1) / parts;
    parallel_tasks(parts, threads, [&](int64_t part, int) {
      int64_t begin = 0;  // of a target among all outputs
      for (const Target& target : targets) {
        if (!target.by.weight) continue;
        const int64_t first = std::max(part * size - begin, int64_t{0});
        const int64_t last = std::min((part + 1) * size - begin, target.outputs);
        begin += target.outputs;
        if (first >= last) continue;
        linear_map<T, kind>(target.by.weight, target.by.bias, x, rows_, inputs, target.outputs,
                            first, last, target.out);
        for (int64_t r = 0; activates && r < rows_; ++r) {
          activate(target.out + r * target.outputs + first, last - first);
        }
      }
    });
  }

  void activate(T* x, int64_t count) const {
    constexpr int64_t L = Vec<T>::L;
    const auto active = [&](vec<T> y) __attribute__((always_inline)) {
      const vec<T> positive = y < T(0) ? vec<T>{} : y;
      return call_.activation == GELU ? gelu(y) : positive * positive;
    };
    int64_t i = 0;
    for (; i + L <= count; i += L) store(x + i, active(load(x + i)));
    if (i < count) store_first(x + i, active(load_first(x + i, count - i)), count - i);
  }

  // normed_ = norm(tokens_)
  void normalize(const NormOfRows& by) {
    const T* weight = of_features(by.weight, of_weight_);
    const T* bias = of_features(by.bias, of_bias_);
    for (int64_t r = 0; r < rows_; ++r) {
      const T* x = tokens_.data() + r * dim_;
      T* to = normed_.data() + r * dim_;
      const T mean = by.kind == LAYER_NORM ? average(x, T(0), [](vec<T> y) { return y; }) : T(0);
      const T square = average(x, mean, [mean](vec<T> y) { return (y - mean) * (y - mean); });
      const T factor = T(1) / std::sqrt(square + T(by.eps));
      for (int64_t d = 0; d < dim_; ++d) to[d] = (x[d] - mean) * factor;
      for (int64_t d = 0; weight && d < dim_; ++d) to[d] *= weight[d];
      for (int64_t d = 0; bias && d < dim_; ++d) to[d] += bias[d];
    }
  }

  const T* of_features(const void* numbers, Buffer<T>& room) const {
    return numbers ? Read::read(static_cast<const Number*>(numbers), dim_, room.data()) : nullptr;
  }

  // The mean of f over one row, where f(rest) is 0.
  template <class F>
  T average(const T* x, T rest, const F& f) const {
    constexpr int64_t L = Vec<T>::L;
    vec<T> total{};
    int64_t d = 0;
    for (; d + L <= dim_; d += L) total += f(load(x + d));
    if (d < dim_) total += f(load_first(x + d, dim_ - d, rest));
    return sum(total) / T(dim_);
  }

  void add(const T* x) {
    for (int64_t i = 0; i < rows_ * dim_; ++i) tokens_[i] += x[i];
  }

  void read(const void* from, T* to) const {
    if constexpr (kind == AS_COMPUTED) {
      std::copy_n(static_cast<const T*>(from), rows_ * dim_, to);
    } else {
      widen(static_cast<const Number*>(from), kind == FLOAT16, rows_ * dim_, to);
    }
  }

  void write() {
    Number* to = static_cast<Number*>(call_.out);
    if constexpr (kind == AS_COMPUTED) {
      std::copy_n(tokens_.data(), rows_ * dim_, to);
    } else {
      narrow(tokens_.data(), kind == FLOAT16, rows_ * dim_, to);
    }
  }

  const BlockStepCall& call_;
  const int64_t rows_, dim_;
  Buffer<T> tokens_, normed_, hidden_;  // [rows, dim] twice, [rows, hidden]
  Buffer<T> of_weight_, of_bias_;       // [dim]: of a norm, where they are halves
};

}  // namespace
}  // namespace graphattn

GRAPHATTN_API int32_t graphattn_block_step(const graphattn::BlockStepCall* call,
                                           int32_t is_double) {
  using namespace graphattn;
  int32_t status = done;
  const int32_t failure = guarded([&] {
    if (is_double) {
      status = BlockStep<double, AS_COMPUTED>(*call).run();
    } else if (call->kind == FLOAT16) {
      status = BlockStep<float, FLOAT16>(*call).run();
    } else if (call->kind == BFLOAT16) {
      status = BlockStep<float, BFLOAT16>(*call).run();
    } else {
      status = BlockStep<float, AS_COMPUTED>(*call).run();
    }
  });
  return failure ? failure : status;
}
