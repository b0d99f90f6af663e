"""Caches for generation: of a layer, of a whole model, and of the sums of linear attention."""
