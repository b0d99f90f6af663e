"""Batches of training examples: order, collation, and calls of a model."""
