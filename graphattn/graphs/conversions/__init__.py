"""Conversions between token graphs and the types of other libraries."""
