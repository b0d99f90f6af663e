"""Builders of token graphs, one file per family."""
