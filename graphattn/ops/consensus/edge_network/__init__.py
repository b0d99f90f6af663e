"""The network that makes the matrix of an edge, as tensors."""
