// What attention over lists of edges is given; library.py has the same structures.
#pragma once

#include <cstdint>

namespace graphattn {

// What a tensor holds: the numbers that a call computes with, or halves of them.
constexpr int64_t AS_COMPUTED = 0, FLOAT16 = 1, BFLOAT16 = 2;

// A tensor [batch, tokens, heads, features]: how many numbers lie between two entries of the first
// three dimensions. Features lie side by side.
struct TokenView {
  void* data;
  int64_t batch, token, head;
  int64_t kind;  // of its numbers; those of lists of edges are all AS_COMPUTED
};

// Tokens of a graph, or places of a cache, that loops over tokens can number (tokens.h).
constexpr int64_t MOST_TOKENS = int64_t{1} << 31;

struct RowsCall {
  int64_t batch, targets, sources, heads, kv_heads, width, value_width;
  int64_t table_heads;             // heads of tables [.., heads] below: more, if a call has some of
                                   // all heads
  int64_t at_once;                 // key heads that go over all rows together; 0: all
  int64_t is_narrow;               // whether the lists of edges, here and below, are of int32_t;
                                   // of int64_t otherwise
  const void *rowptr, *source;     // [targets + 1], [edges]: the sources of every target
  const void *order, *before;      // [targets], [targets + 1]: which target is visited when, and
                                   // how many edges before it; null: as they lie
  TokenView query, key, value;
  int64_t is_rbf;          // whether logits are -scale |q - k|^2 / 2; scale q . k otherwise
  const void* scale;       // [heads]
  int64_t top_k;           // edges that a target and head keeps; 0: all
  double softcap;          // 0: none
  const void* bias;        // [edges, heads], one such table per sample, or null
  int64_t bias_batch;      // numbers between two samples' biases; 0: they share one
  const void* bias_row;    // [edges]: which row of the bias an edge reads; null: its own
  const uint8_t* valid_targets;  // [batch, targets], or null
  const uint8_t* valid_sources;  // [batch, sources], or null
  double dropout;
  const int64_t* drop_rows;    // [batch, targets, heads], or null: no dropout
  const int32_t* drop_columns; // [sources]
  int64_t drop_below;          // an edge whose hash is less is dropped
  TokenView out;               // written
  void* lse;                   // [batch, targets, heads], written
  int64_t threads;
};

struct RowsGradients {
  const void *colptr, *target, *edge;  // the same edges by source: [sources + 1], [edges] twice
  const void *order, *before;          // the same for sources; null where the call's are
  TokenView d_out;
  const void* d_lse;  // [batch, targets, heads], or null
  TokenView d_query, d_key, d_value;  // written
  double* d_scale;       // [heads], added to
  void* d_bias;          // [edges, heads], added to, or null
  int64_t d_bias_batch;  // numbers between two samples' gradients; 0: they share one
  const void *lse, *delta;  // [batch, targets, heads], or null: log-sums over more edges than the
                            // call's, and output . d_out - d_lse over all of these
};

}  // namespace graphattn
