"""Attention over any edges, row by row of the graph's adjacency matrix (CSR). In this order:

- `schedule`: which edges a program takes.
- `inputs`: what the kernels are given, and how they are started.
- `math`: what every kernel does with its rows.
- `split_rows`: long rows are cut into parts, which are put together here.
- `forward`, `backward`: attention, and its gradients.
- `top_k`: which edges of a row count.
- `configurations`: the launches that are compiled ahead of time.
"""
