"""Attention over the sources of all ranks: rows of one rank at a time, or sums of rows."""
