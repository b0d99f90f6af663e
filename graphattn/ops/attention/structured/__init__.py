"""Attention by what is known of a graph: tiles of neighbouring tokens, or rows of a few sources.

Same rules as reference.py, which it is tested against. `tiles.py` says where the edges lie,
`contiguous.py` attends over them, `rows.py` gathers for all other graphs, `parts.py` puts together
what is best done in parts, and `plans.py` chooses.
"""

from graphattn.ops.attention.structured.plans import attend, plan_call, run

__all__ = ["attend", "plan_call", "run"]
