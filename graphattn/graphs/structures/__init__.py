"""Structures: what is known of a graph in closed form, and tables of it for kernels."""
