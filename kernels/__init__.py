"""Triton kernels; installed as `graphattn.kernels`.

A kernel knows tensors and index arrays only, never a TokenGraph. Read them in this order:

- `band_tables`: which tile of which sequence a program takes.
- `band_math`: what every kernel does with a tile.
- `band`, `band_backward`, `band_table`: attention over windows, causal and complete graphs.
- `topk`: which sources of a window count, for `top_k` over bands.
- `window_step`: one token of generation: a cache takes it in, and it attends to its window.
- `gaussian`: the same where query, key and value are one tensor.
- `edge_tables`, `edge_math`: the same for lists of edges, row by row.
- `edges`, `edges_backward`, `edge_selection`: attention over any edges, top-k within rows.
- `knn`, `knn_exact`: nearest neighbours.
- `consensus_edges`, `consensus_math`, `consensus`, `consensus_backward`: a consensus step;
  `both_ends`: sums of what its edges say.
- `row_dots`: products of rows, which the others need.
- `band_inputs`, `edge_inputs`, `consensus_inputs`, `tuning`, `launch`: what they are given, their
  sizes, their start.
- `configurations` (and `band_`, `edge_`, `knn_`, `window_step_`, `consensus_configurations`),
  `ahead_of_time`, `prediction`, `check`: looking at them without a GPU.
- `cpu`: kernels in C++, for processors.
"""
