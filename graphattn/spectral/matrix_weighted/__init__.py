"""Spectra of graphs with a matrix on every edge, as in consensus layers."""
