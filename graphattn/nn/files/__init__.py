"""Saving layers and models to files, together with their constructor arguments."""
