"""Krause shortcuts parallel to the attention of pretrained language models."""
