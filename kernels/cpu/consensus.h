// What the sums of a consensus step are given; graphattn/ops/consensus/native has the same
// structures.
#pragma once

#include <cstdint>

#include "rows.h"

namespace graphattn {

// The second layer of the edge network, side by side as torch keeps it, or its gradients.
struct ConsensusNetwork {
  void *alpha, *alpha_bias;  // [heads, hidden], [heads]
  void *beta, *beta_bias;    // likewise
  void *shear, *shear_bias;  // [heads, rank, width, hidden], [heads, rank, width]
};

struct ConsensusCall {
  int64_t batch, targets, sources, heads, groups, width, rank, hidden;
  int64_t trunks;  // 1, or 3: thirds of the hidden vectors feed alpha, beta and Lambda
  const int64_t *rowptr, *source;  // [targets + 1], [edges]: the sources of every target; or null:
  const int64_t* moves;            // [move_count], ascending: target i sees i + move where both are
  int64_t move_count;              // in one sequence
  const int64_t* borders;          // [border_count]: where sequences begin, but for the first
  int64_t border_count;
  int64_t energy;  // whether both ends move; self-loops are no edges then
  TokenView target_hidden, source_hidden;  // [batch, tokens, groups, trunks * hidden]
  TokenView u, v;                          // [batch, tokens, heads, width]
  const void* edge;    // numbers of edges in the order of the rows, or null: [batch or 1, edges, 1,
                       // edge_inputs], to which a first layer is applied; or, without inputs,
                       // what is added to hidden vectors, [batch or 1, edges, groups, features]
  int64_t edge_batch;  // numbers between two samples' edges; 0 where they share them
  int64_t edge_inputs;
  const void* edge_weight;  // [groups, edge_inputs, trunks * hidden], or null
  ConsensusNetwork network;
  const uint8_t* valid_targets;  // [batch, targets], or null
  const uint8_t* valid_sources;  // [batch, sources], or null
  TokenView gradient;            // [batch, targets, heads, width], written
  void* degree;                  // [batch, targets, heads], written; or null
  void* kept;                    // what a forward leaves for its backward, of every block of edges
                                 // and head: logits and raw rows, [2 + rank * width, EDGES]; or
                                 // null. All edges are then one round
  int64_t round;                 // edges whose results are there at a time; 0: as suits the cache
  int64_t threads;
};

// What the backward of a call reads and writes beside it.
struct ConsensusGradients {
  TokenView d_gradient;  // [batch, targets, heads, width]
  const void* d_degree;  // [batch, targets, heads], or null
  TokenView target_hidden, source_hidden, u, v;  // written; null where nobody asks: both of a pair
  void *edge, *edge_weight;  // written, as they are in the call; null where nobody asks
  int64_t edge_count;        // numbers of `edge`
  ConsensusNetwork network;  // written; all null where nobody asks
};

}  // namespace graphattn
