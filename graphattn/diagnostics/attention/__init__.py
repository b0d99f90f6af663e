"""Attention of a model while it runs: calls, operands, weights and their statistics."""
