"""Attention by the structure of a graph: tiles of neighbouring tokens, or rows of a few sources.

This is the fallback where no compiled code runs. The results are those of reference.py, against
which it is tested. `plans.py` chooses a plan for a graph, and has plans that combine others;
`chunked.py` processes tiles or rows a few at a time; `chunks.py` computes attention in them, from
the logits of `pair_scores.py`; `recompute.py` has what all plans share: their autograd function.
"""

from graphattn.ops.attention.structured.plans import (
    OPERATIONS,
    attend,
    gradients_of_part,
    plan_of,
)

__all__ = ["OPERATIONS", "attend", "gradients_of_part", "plan_of"]
