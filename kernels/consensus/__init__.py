"""A consensus step. In this order:

- `schedule`: the edges of a graph, a bounded piece at a time.
- `inputs`: what the kernels are given, and how they are started.
- `math`: what every kernel does with a tile of edges.
- `forward`, `backward`: the message of every edge, and its gradients.
- `sum_messages`: the sum of messages at every token, in a fixed order.
- `configurations`: the launches that are compiled ahead of time.
"""
