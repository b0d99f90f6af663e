"""Certificates: which theorems hold for a graph, a layer, a model."""
