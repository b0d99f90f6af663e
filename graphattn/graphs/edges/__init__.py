"""Storage of a graph's edges: in closed form, as a table, or as a sorted list."""
