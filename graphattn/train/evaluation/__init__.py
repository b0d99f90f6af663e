"""Evaluation of trained models, beside guesses without a model."""
