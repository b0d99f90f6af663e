// What a step of generation is given; graphattn/ops/attention/native/steps.py has the same structure.
#pragma once

#include <cstdint>

#include "rows.h"

namespace graphattn {

// The newest tokens of some texts attend to a cache. Token j of the `held` ones stands at place
// (first + j) mod room of the cache.
struct StepsCall {
  int64_t texts, queries, heads, kv_heads, width, value_width;
  int64_t room, first, held;
  const int64_t* lengths;  // [texts]: tokens of a text, where they differ; null: `held` of each
  int64_t window;          // tokens that a query sees, itself included; 0: all before it
  TokenView query;         // [texts, queries, heads, width]: the last tokens of every text
  TokenView key, value;    // [texts, room, kv_heads, width or value_width]
  TokenView new_key;       // [texts, 1, kv_heads, width], to be written as the newest; or null
  TokenView new_value;
  int64_t is_rbf;          // whether logits are -scale |q - k|^2 / 2; scale q . k otherwise
  const void* scale;       // [heads] or [1], or null: `same_scale`
  int64_t scale_step;      // 1, or 0 where all heads share one
  int64_t is_log_sigma;    // whether that holds log(sigma), and the scale is 1 / sigma^2
  double same_scale;
  int64_t top_k;           // tokens that a query and head keeps; 0: all
  double softcap;          // 0: none
  double eps;              // stands beside the sum of a row's exponentials
  const void* sink;        // [heads]: logits that do; or null
  const void *cosines, *sines;  // [texts, width / 2]: queries and new keys are turned by; or null
  int64_t turn_batch;           // numbers between two texts' angles; 0: they share them
  uint8_t* valid;          // [texts, room]: which tokens are real; or null. With one query alone
  const uint8_t* new_valid;     // [texts]: whether the newest are; null: all
  int64_t new_valid_step;
  TokenView out;           // [texts, queries, heads, value_width], written
  void* lse;               // [texts, queries, heads], written; or null
  int64_t threads;
};

}  // namespace graphattn
