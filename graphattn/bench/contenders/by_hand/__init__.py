"""Attention as experts write it by hand, for comparison."""
