"""Evaluation of trained models, and losses of guessing without a model."""
