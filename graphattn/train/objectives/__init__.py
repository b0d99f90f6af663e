"""Objectives: from examples to a batch, a loss, and numbers to report."""
