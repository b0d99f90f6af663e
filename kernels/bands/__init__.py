"""Attention over bands: windows, causal and complete graphs, and batches of them. In this order:

- `schedule`: which tile of which sequence a program takes.
- `inputs`: what the kernels are given; `arguments`: tuples of what belongs together.
- `math`: what every kernel does with a tile.
- `forward`, `backward`: attention, and its gradients.
- `hopper`: the forward over a window, as Hopper is meant to do it; not used unless asked for.
- `bias_backward`: the gradient of a table of biases by offset.
- `top_k`: which sources of a window count.
- `one_tensor`: the same where query, key and value are one tensor.
- `configurations`: the launches that are compiled ahead of time.
"""
