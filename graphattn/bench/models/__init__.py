"""Whole models as contenders: language models, vision models, generation, and single mixers."""
