"""Objectives: how examples become a batch, a loss, and numbers to report."""
