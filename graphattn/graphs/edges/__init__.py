"""Edges of a graph as memory holds them: in closed form, as tables, or as sorted lists."""
