"""Triton kernels; installed as `graphattn.kernels`.

A kernel knows tensors and index arrays only, never a TokenGraph. Read them in this order:

- `band_tables`: which tile of which sequence a program takes.
- `band_math`: what every kernel does with a tile.
- `band`, `band_backward`, `band_table`: attention over windows, causal and complete graphs.
- `gaussian`: the same where query, key and value are one tensor.
- `row_dots`: products of rows, which the others need.
- `band_inputs`, `tuning`, `launch`: what they are given, their sizes, how they are started.
- `configurations`, `ahead_of_time`, `prediction`, `check`: looking at them without a GPU.
"""
