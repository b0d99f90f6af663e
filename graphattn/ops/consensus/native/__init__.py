"""Consensus by compiled code on a CPU: edges in the lanes of vectors, a block of them at a time.

`sums.py` is a step and its gradients, `steps.py` the row of a token that is generated, and
`calls.py` what both hand to C++.
"""

from __future__ import annotations

from graphattn.ops.consensus.native.sums import gradients_of_sums, sums_over_edges

__all__ = ["gradients_of_sums", "sums_over_edges"]
