"""Compiled kernels for CPUs: C++ behind a plain C interface; installed as `graphattn.kernels.cpu`.

Like the kernels above them they know tensors and index arrays only. Read them in this order:

- `simd.h`: vectors of floats and doubles, as wide as the instruction set, and their exponential.
- `tasks.h`: a loop over tasks on several threads, and the memory that tasks work in.
- `feature_sums.h`: what is summed up over the features of a token, and numbers as ordered integers.
- `interface.h`: what a function of the C interface is written with.
- `native.cpp`: what a build is, and entries for tests.
- `library`: which build this process uses, or why none.
- `tensors`: tensors as kernels are given them.

Attention over lists of edges:

- `rows.h`: what a call is given.
- `tokens.h`, `tokens.cpp`: the loops over the tokens of a row, compiled for every usual width.
- `rows.cpp`: forward and backward, row by row.
- `visits.cpp`: an order of rows in which those that share sources follow each other.
- `edge_order.cpp`, `edge_order`: a list sorted by counting, and what is wrong with it.

Attention over bands, which are windows, blocks and whole sequences:

- `bands.h`: what a call is given.
- `band_plan.h`: how bands are cut into tasks, and the memory of a task.
- `precision.h`: how half precision is read and written.
- `band_tiles.h`: a few targets times a few vectors of keys, in registers.
- `band_diagonals.h`: narrow windows, offset by offset, with the targets of a block in the lanes.
- `band_top_k.h`: the largest logits of a row.
- `band_rows.h`: one row in double precision, for the few of which tiles would lose something.
- `band_forward.h`, `bands.cpp`: forward, and backward.

Nearest neighbours:

- `exact_distances.h`: squared distances in float64, which decide.
- `masks.h`: which lanes of a vector are small enough, and lists of those.
- `shortlist.h`: what may be among the nearest of a target, while rounded distances come by.
- `points.h`: which points are finite, which are copies of others, how large they are.
- `point_blocks.h`: points in blocks, and boxes around blocks.
- `neighbor_blocks.cpp`: few coordinates; the nearest blocks first, and none that are too far.
- `columns.h`, `neighbor_products.cpp`: many coordinates; products in registers, never stored.
- `neighbors.cpp`: squared distances of given pairs.
- `neighbors`: which of them is called, and with what.

Consensus:

- `gelu.h`: the exact GELU and softplus, with their derivatives.
- `transpose.h`: from a vector per edge to an edge per lane, and back.
- `edge_products.h`: products of matrices for the edges of a block.
- `consensus.h`, `consensus_steps.h`: what calls are given.
- `consensus_walk.h`: the edges of a graph, a run of them at a time.
- `consensus_block.h`: what the matrices of a block of edges make of a vector.
- `consensus.cpp`, `consensus_backward.cpp`: the sums of a step, and their gradients.
- `consensus_steps.cpp`: the newest tokens of texts move towards those of a cache.

Steps of generation:

- `steps.h`: what a call is given.
- `steps.cpp`: the newest tokens of texts attend to a cache, and join it.
- `few_rows.h`: linear maps of a few tokens.
- `block_steps.h`, `block_steps.cpp`: a transformer block around that, with norms and perceptron.

`setup.py` builds the same sources once per instruction set (`_native_base`, `_native_v3` for AVX2,
`_native_v4` for AVX-512). Only constants of inner loops are template arguments. Every other option
is a value at run time, or a build would take minutes (`tests/native/test_native_size.py` counts).
Every `.cpp` and `.h` file of this folder belongs to the build. There is no Python and no torch in
it, so one build serves every version of both.
"""
