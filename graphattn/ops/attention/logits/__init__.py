"""Logits of edges: scores, biases, and the bound that softcap sets."""
