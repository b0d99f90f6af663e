"""Triton kernels, one file per family; installed as `graphattn.kernels`.

A kernel knows tensors and index arrays only, never a TokenGraph. There are none yet: every
operation runs on the reference backend (see CHANGELOG.md for what comes next).
"""
