// What attention over bands is given; library.py and bands.py have the same structures.
#pragma once

#include <cstdint>

#include "rows.h"

namespace graphattn {

// A row of the table of sequences: target i sees the sources i - before .. i + after that exist,
// but not source i + hop where `loops` is -2 hop; 1: it sees all of them.
struct Sequence {
  int64_t target, targets, source, sources, step, before, after, loops;
};

struct BandsCall {
  int64_t batch, targets, sources, heads, kv_heads, width, value_width;
  int64_t count;  // of sequences
  const Sequence* sequences;
  TokenView query, key, value;  // query, key, value and out may all be of half precision
  int64_t is_rbf;      // whether logits are -scale |q - k|^2 / 2; scale q . k otherwise
  const void* scale;   // [heads]
  int64_t top_k;       // edges that a target and head keeps; 0: all
  double softcap;      // 0: none
  const void* table;   // [offsets, heads], or null
  int64_t offsets;
  int64_t origin;      // the row of the table that target i reads for source i
  const uint8_t* valid_targets;  // [batch, targets], or null
  const uint8_t* valid_sources;  // [batch, sources], or null
  TokenView out;       // written
  void* lse;           // [batch, targets, heads], written
  void* kept;          // [batch, targets, heads, numbers_kept]: of every row what the backward reads
  int64_t keeps_outputs;  // whether that has the output, too: rounded to halves it would not do
  int64_t threads;
};

// The largest logit and 1 / sum; with top-k, also the least logit kept and its place; the output.
inline int64_t numbers_kept(const BandsCall& call) {
  return (call.top_k > 0 ? 4 : 2) + (call.keeps_outputs ? call.value_width : 0);
}

struct BandsGradients {
  TokenView d_out;  // d_out and d_query are of the query's precision; what is added to never is half
  const void* d_lse;  // [batch, targets, heads], or null
  TokenView d_query, d_key, d_value;  // written
  double* d_scale;    // [heads], added to
  double* d_table;    // [offsets, heads], added to, or null
};

}  // namespace graphattn
