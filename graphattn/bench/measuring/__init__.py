"""Measurements: whether a result is right, its time, its memory, and a whole run."""
