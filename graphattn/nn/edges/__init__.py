"""Learned numbers of edges: biases of logits, and the edge network of consensus."""
