"""Attention as experts write it by hand, to compare with."""
