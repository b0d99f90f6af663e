"""The consensus engine: steps that reduce the disagreement along the edges of a graph."""
