"""Replacement of attention modules by other mechanisms."""
