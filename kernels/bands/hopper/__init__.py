"""The forward over a window, as Hopper is meant to do it, in Triton's Gluon. In this order:

- `choice`: which inputs it takes. No GPU has run it, so it must be asked for.
- `forward`: the kernel.
"""
