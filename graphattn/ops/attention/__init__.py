"""The attention engine: averages over the edges of a graph, by dot product or distance."""
