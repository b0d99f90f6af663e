"""Certificates, which say which theorems hold for a graph, a layer or a model."""
