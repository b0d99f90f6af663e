"""Whole models as contenders: language and vision models, generation, and ours by mixer."""
