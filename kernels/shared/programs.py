"""Batch entry, head and tile of a program: its number, taken apart."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heads_first(num_tiles, heads):
    """Batch entry, head and tile of a program, for a grid of batch x tiles x heads.

    Heads vary fastest: programs that start together read neighbouring parts of the same tokens.
    """
    i_program = tl.program_id(0)
    i_h = i_program % heads
    i_tile = (i_program // heads) % num_tiles
    i_b = ((i_program // heads) // num_tiles).to(tl.int64)
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
