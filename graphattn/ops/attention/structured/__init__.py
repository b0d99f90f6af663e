"""Attention by what is known of a graph: tiles of neighbouring tokens, or rows of a few sources.

The fallback where no compiled code runs. Same rules as reference.py, which it is tested against.
`plans.py` chooses, `tiles.py` says where edges lie, `chunked.py` goes over tiles and rows a few at
a time, `chunks.py` says what happens in them (with `scores.py` and `softmax.py`), and `parts.py`
puts together what is best done in parts.
"""

from graphattn.ops.attention.structured.plans import attend, plan_call, run

__all__ = ["attend", "plan_call", "run"]
