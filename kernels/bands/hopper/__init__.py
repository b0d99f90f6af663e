"""Attention over bands as Hopper is meant to do it: `forward`, in Triton's Gluon.

`choice` says which inputs it takes. No GPU has run it yet.
"""
