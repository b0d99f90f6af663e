"""Triton kernels; installed as `graphattn.kernels`.

A kernel knows tensors and index arrays only, never a TokenGraph. Each family has a folder:

- `bands`: attention over windows, causal and complete graphs.
- `edges`: attention over any edges, row by row.
- `consensus`: a consensus step; its sums at tokens go over rows of `edges`.
- `neighbors`: nearest neighbours, also within `bands`.
- `generation`: one token of generation.
- `shared`: functions that several families use.
- `check`: compiles kernels without a GPU, and judges their machine code.
- `cpu`: kernels in C++, for processors.

Files of families have the same names: `schedule` says which tile a program takes, `inputs` lays out
the arguments, `math` is the arithmetic on a tile; `forward` and `backward` are the kernels.

Names in kernels begin with what they are: ``i_`` scalars, such as the numbers of the batch entry
`i_b`, head `i_h` and tile `i_tile` of a program, ``n_`` numbers of tokens, ``o_`` offsets and
places, ``m_`` masks, ``p_`` pointers, and ``b_`` tiles (blocks of numbers). A comment with a shape,
such as ``# [ROWS, COLUMNS]``, gives that of what the lines below it compute. ``d_x`` is the
gradient of the loss with respect to ``x``. Of the dimensions, B are batch entries, N targets, M
sources, E edges, H query heads, Hk key heads, D features of queries and keys, and DV or Dv features
of values.

Names in capitals are constants of compilation (``tl.constexpr``). They are explained at
`BandInputs.common`, `EdgeInputs.common` and `ConsensusInputs.common`, in `inputs` of each family.
"""
