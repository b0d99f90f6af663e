"""Attention by the structure of a graph: tiles of neighbouring tokens, or rows of a few sources.

This is the fallback where no compiled code runs. The results are those of reference.py, against
which it is tested. `plans.py` chooses a plan for a graph, `tiles.py` finds the tiles of a graph,
`chunked.py` processes tiles or rows a few at a time, and `chunks.py` computes attention in them
(with `pair_scores.py`, `squares.py` and `softmax.py`). `parts.py` has plans that combine other
plans.
"""

from graphattn.ops.attention.structured.plans import attend, gradients_of_part, plan_call
from graphattn.ops.attention.structured.recompute import run

__all__ = ["attend", "gradients_of_part", "plan_call", "run"]
