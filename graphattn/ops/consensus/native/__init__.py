"""Consensus by C++ code on a CPU, which computes a block of edges at a time, one per vector lane.

`sums.py` is a step and its gradients, `steps.py` a step of generation. `calls.py` has the arguments
that both pass to C++.
"""

from __future__ import annotations

from graphattn.ops.consensus.native.sums import gradients_of_sums, sums_over_edges

__all__ = ["gradients_of_sums", "sums_over_edges"]
