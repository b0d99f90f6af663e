"""Layers and models as files, and the arguments that made them."""
