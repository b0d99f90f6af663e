"""Batches of items that have graphs of their own."""
