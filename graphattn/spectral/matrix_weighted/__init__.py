"""Spectra of graphs with a matrix on every edge, as consensus layers have them."""
