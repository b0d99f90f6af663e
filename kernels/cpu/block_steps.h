// What a step of a transformer block is given; graphattn/ops/attention/native/blocks.py has the
// same structures.
#pragma once

#include <cstdint>

#include "steps.h"

namespace graphattn {

constexpr int64_t LAYER_NORM = 0, RMS_NORM = 1;
constexpr int64_t GELU = 0, SQUARED_RELU = 1;

// As torch defines them: LayerNorm (Ba et al., 2016), and RMSNorm (Zhang and Sennrich, 2019), whose
// mean is 0 and which has no bias.
struct NormOfRows {
  int64_t kind;
  double eps;
  const void *weight, *bias;  // [dim], or null
};

// y = W x + b
struct LinearMap {
  const void* weight;  // [outputs, inputs]; null: y is x
  const void* bias;    // [outputs], or null
};

// The newest token of every text passes through a block: x' = x + mixer(norm(x)), and
// x' + down(activation(up(norm(x')))).
struct BlockStepCall {
  int64_t rows, dim;           // texts, features
  int64_t kind;                // of x, mixed, out and all weights
  int64_t threads;
  const void* x;               // [rows, dim]
  const void* mixed;           // [rows, dim]: mixer(norm(x)), where `attention` is null
  void* out;                   // [rows, dim], written
  const StepsCall* attention;  // its query, new_key, new_value and out are set here
  NormOfRows mixer_norm;
  int64_t values_are_keys;
  LinearMap query, key, value, output;
  int64_t hidden;              // features inside of the perceptron
  NormOfRows mlp_norm;
  LinearMap up, down;
  int64_t activation;
};

}  // namespace graphattn
