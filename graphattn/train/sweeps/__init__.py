"""Sweeps: many training runs with different mixers, learning rates and seeds."""
