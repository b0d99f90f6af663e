"""Triton kernels; installed as `graphattn.kernels`.

A kernel knows tensors and index arrays only, never a TokenGraph. One folder a family:

- `bands`: attention over windows, causal and complete graphs.
- `edges`: attention over any edges, row by row.
- `consensus`: a consensus step; it sums up at rows of `edges`.
- `neighbors`: nearest neighbours, also within `bands`.
- `generation`: one token of generation.
- `shared`: what all of them use.
- `check`: looking at them without a GPU.
- `cpu`: kernels in C++, for processors.

Files of families have the same names: `schedule` says which tile a program takes, `inputs` what it
is given, `math` what it does with a tile; `forward` and `backward` are the kernels.

Names in kernels: ``i_`` program ids and other scalars, ``n_`` numbers of tokens, ``o_`` offsets,
``m_`` masks, ``p_`` pointers, ``b_`` tiles.
"""
