"""Absorbing discrete diffusion: noise that masks tokens, score entropy, sampling, likelihood."""
