"""Functions that several families of kernels use.

This folder imports no family.

- `launch`: which tensors kernels take, and how a kernel is started, or only recorded.
- `tuning`: sizes of tiles.
- `layout`: tensors as kernels read them, and loads and stores of the features of any tokens.
- `programs`: which batch entry, head and tile a program takes.
- `precision`: matrix products, and how those of float32 numbers keep their digits.
- `exponentials`: base 2 inside kernels; weights from logits.
- `ordered_integers`: logits as integers in the same order.
- `stored`: tables that are made once for a device: when they may be stored, and who may read them.
- `row_dots`: dot products of rows of features, in a kernel of its own.
- `configuration`: a launch and how much work it is, for `check`.
"""
