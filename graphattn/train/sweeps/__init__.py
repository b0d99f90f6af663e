"""Sweeps: many trainings that differ in mixer, learning rate and seed."""
