"""Ways to compute an operation: by graphattn, by other libraries, and by hand-written code."""
