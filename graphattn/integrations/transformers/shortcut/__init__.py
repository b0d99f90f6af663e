"""Krause shortcuts beside the attention of pretrained language models."""
