"""Parts that several families of kernels use.

It imports none of them.

- `launch`: which tensors kernels take, and how a kernel is started, or only recorded.
- `tuning`: sizes of tiles.
- `layout`: tensors as kernels read them, and rows of features at any places.
- `programs`: which batch entry, head and tile a program takes.
- `precision`: products, and how those of float32 numbers keep their digits.
- `exponentials`: base 2 inside kernels; weights from logits.
- `ordered_integers`: logits as whole numbers in the same order.
- `row_dots`: products of rows, a kernel of its own.
- `configuration`: what a launch has to do in all, for `check`.
"""
