"""Laplacians of token graphs: as matrices, as operators, and solvers for them."""
