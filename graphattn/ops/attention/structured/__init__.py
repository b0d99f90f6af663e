"""Attention by what is known of a graph: tiles of neighbouring tokens, or rows of a few sources.

Same rules as reference.py, which it is tested against. `tiles.py` says where the edges lie,
`contiguous.py` attends over them, `rows.py` gathers for all other graphs, and `merge.py` puts
together what is best done in parts.
"""

from graphattn.ops.attention.structured.merge import attend

__all__ = ["attend"]
