"""Attention over the sources of all ranks, with the rows of one rank at a time."""
