"""Consensus by C++ code on a CPU: `sums.py` is a step and its gradients, `steps.py` generation."""
