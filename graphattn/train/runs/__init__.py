"""Runs: their configuration, their setup, their folder, and what is read back from it."""
