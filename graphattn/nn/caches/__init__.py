"""Caches of generation: of a layer, of a model, and of running sums."""
