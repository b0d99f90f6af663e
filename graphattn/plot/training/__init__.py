"""Figures of training: curves, runs and sweeps."""
