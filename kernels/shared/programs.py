"""Batch entry, head and tile of a program, from its number.

`i_b` has 64 bits, because it is multiplied by large strides.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_and_rest(heads):
    """Return the head of a program for a grid of anything x heads, and the number of the rest."""
    i_program = tl.program_id(0)
    i_h = i_program % heads
    return i_h, i_program // heads


@triton.jit
def heads_first(num_tiles, heads):
    """Batch entry, head and tile of a program, for a grid of batch x tiles x heads.

    Heads vary fastest: programs that start together read neighbouring parts of the same tokens.
    """
    i_h, i_rest = head_and_rest(heads)
    i_tile = i_rest % num_tiles
    i_b = (i_rest // num_tiles).to(tl.int64)
    return i_b, i_h, i_tile


@triton.jit
def tiles_first(entries, num_tiles):
    """Batch entry, head and tile of a program, for a grid of heads x batch x tiles.

    Heads vary slowest: programs that run together read the weights of one head.
    """
    i_program = tl.program_id(0)
    i_h = (i_program // num_tiles) // entries
    i_b = ((i_program // num_tiles) % entries).to(tl.int64)
    return i_b, i_h, i_program % num_tiles
