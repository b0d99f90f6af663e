"""Ranks that fail, hang or die, and graphs that differ between ranks: errors on every rank."""
