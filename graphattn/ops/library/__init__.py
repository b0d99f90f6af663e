"""Engines as operators of torch.library."""
