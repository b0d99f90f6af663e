"""Laplacians of token graphs: as matrices, as operators, and how to solve with them."""
