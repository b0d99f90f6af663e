"""Recording the attention of a model while it runs: calls, weights and their statistics."""
