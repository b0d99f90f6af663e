"""Masks of Hugging Face models, read as token graphs."""
