"""Foundations of every layer over a token graph: message passing, overrides, generation."""
