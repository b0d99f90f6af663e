"""Transformer blocks around a layer, and their parts."""
