// What rotation by positions is given; graphattn/ops/rotary.py has the same structure.
#pragma once

#include <cstdint>

#include "rows.h"

namespace graphattn {

// Feature d of a head turns with feature d + width / 2, by the angle of its token and of d.
struct TurnCall {
  int64_t batch, tokens, heads, width;
  TokenView x, out;             // of one precision; both may be one tensor
  int64_t other_heads;          // of another tensor that is turned by the same angles; 0: none
  TokenView other, other_out;
  const void *cosines, *sines;  // [batch, tokens, width / 2]
  int64_t angle_batch;          // numbers between two samples' angles; 0: they share them
  int64_t angle_token;
  int64_t is_back;  // whether angles are the other way round
  int64_t threads;
};

}  // namespace graphattn
