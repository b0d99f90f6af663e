"""Learned values per edge: biases of logits, and the edge network of consensus."""
