"""Batches of training examples: their order, how they are joined, how a model is called on them."""
