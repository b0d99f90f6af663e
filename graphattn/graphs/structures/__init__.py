"""Structures of graphs in closed form, and the tables of them that kernels read."""
