// What a step of generation by consensus is given; graphattn/ops/consensus/native/steps.py has the
// same structure.
#pragma once

#include <cstdint>

#include "consensus.h"

namespace graphattn {

// The newest token of some texts moves towards the tokens of a cache, of which it is one. Token j of
// the `held` ones stands at place (first + j) mod room.
struct ConsensusStepsCall {
  int64_t texts, heads, groups, width, rank, hidden, trunks;
  int64_t room, first, held;
  TokenView state;          // the cache: [texts, room, heads, width]
  TokenView hidden_vectors; // and [texts, room, groups, trunks * hidden]
  TokenView moving;         // u of the newest: [texts, 1, heads, width]
  TokenView compared;       // what is compared with `state`; and what joins it:
  TokenView new_state;
  TokenView target_hidden;  // [texts, 1, groups, trunks * hidden], and what joins `hidden_vectors`;
  TokenView new_hidden;     // or null both, and the first layers are applied here:
  TokenView token;          // [texts, 1, groups, inputs]
  int64_t inputs;
  const void *target_weight, *target_bias, *source_weight;  // [groups, trunks * hidden, inputs]
  const void* source_bias;                                  // and [groups, trunks * hidden], or null
  ConsensusNetwork network;
  int64_t is_automatic;     // whether the step is 1 / the sum of alpha + beta
  const void* step;         // [heads], or null: `same_step`
  double same_step;
  uint8_t* valid;           // [texts, room]: which tokens are real; or null
  const uint8_t* new_valid; // [texts]: whether the newest are; null: all
  int64_t new_valid_step;
  TokenView out;            // [texts, 1, heads, width], written
  int64_t threads;
};

}  // namespace graphattn
