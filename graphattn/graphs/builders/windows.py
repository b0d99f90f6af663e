"""Graphs of windows along a sequence, causal and complete graphs, and blocks."""

from __future__ import annotations

from graphattn.graphs.arguments import as_int
from graphattn.graphs.structures.composites import Section
from graphattn.graphs.structures.structure import Band, Blocks, Complete, Cycle
from graphattn.graphs.token_graph import TokenGraph


def window_path_graph(num_tokens: int, window: int, *, self_loops: bool = False) -> TokenGraph:
    """Every token sees the `window` tokens on each side of it: ``0 < |i - j| <= window``.

    It is the window-path graph of Definition 3.1 (Stabilizing Transformer Training Through
    Consensus).
    With ``self_loops=True`` a token also sees itself, as in sliding-window attention::

        window = 2:    . . x x i x x . .      (i itself only with self_loops)

    Args:
        num_tokens: N.
        window: tokens on each side, >= 1.
        self_loops: whether a token sees itself.

    Raises:
        ValueError: if `num_tokens` < 0 or `window` < 1.

    Example:
        >>> import graphattn as ga
        >>> ga.window_path_graph(1_000_000, window=8).num_edges  # no edge is listed
        15999928
    """
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    return TokenGraph(structure=Band(num_tokens, window, window, 1, bool(self_loops)))


def window_cycle_graph(num_tokens: int, window: int) -> TokenGraph:
    """Every token sees the `window` tokens on each side; the last token is next to the first.

    It is the graph of Remark 4.1 (Stabilizing Transformer Training Through Consensus). If
    ``2 * window >= num_tokens``, the two sides overlap. Each edge still exists once, so every token
    sees all others, and the closed form of Remark 4.1 does not hold.

    Raises:
        ValueError: if `num_tokens` < 0 or `window` < 1.

    Example:
        >>> import graphattn as ga
        >>> ga.window_cycle_graph(5, window=1).edge_index[:, :4]
        tensor([[1, 4, 0, 2],
                [0, 0, 1, 1]])
    """
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    if 2 * window >= num_tokens:
        return complete_graph(num_tokens, self_loops=False)
    return TokenGraph(structure=Cycle(num_tokens, window))


def causal_window_graph(num_tokens: int, window: int, *, past: int = 0) -> TokenGraph:
    """Every token sees the last `window` tokens, including itself: i - window < j <= i.

    `window` counts keys, as in the Krause and GKA papers. (In nanochat, a window of the same number
    has one key more.) ::

        window = 3:    . . x x i . . .

    With `past`, the graph is rectangular: of past + num_tokens tokens, the last `num_tokens` are
    its targets, and all are its sources, even those that no window reaches. It serves for a chunk
    of a text when a cache stores the tokens before it. Layers take it as
    ``layer(x_new, graph, context=torch.cat([x_past, x_new], -2))``. (``graph.targets(start, stop)``
    makes a similar graph that has only the sources between the first and the last one seen.)

    Args:
        num_tokens: N, the number of targets.
        window: keys of every target, >= 1.
        past: m, the number of tokens before the first target. There are m + N sources. The targets
            have positions m .. m + N - 1, the sources 0 .. m + N - 1.

    Raises:
        ValueError: if `num_tokens` < 0, `window` < 1 or `past` < 0.

    Example:
        >>> import graphattn as ga
        >>> ga.causal_window_graph(4, window=2).to_mask().int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
        >>> graph = ga.causal_window_graph(2, window=2, past=2)  # the last two of these rows
        >>> graph.to_mask().int()
        tensor([[0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
        >>> graph.positions, graph.source_positions
        (tensor([2, 3]), tensor([0, 1, 2, 3]))
    """
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    past = as_int("past", past, 0)
    return _causal(num_tokens, window - 1, past)


def causal_graph(num_tokens: int, *, past: int = 0) -> TokenGraph:
    """Every token sees itself and all tokens before it: j <= i.

    With `past`, the graph is rectangular: of past + num_tokens tokens, the last `num_tokens` are
    its targets, and all are its sources. It serves for a chunk of a text when a cache stores the
    tokens before it. Layers take it as
    ``layer(x_new, graph, context=torch.cat([x_past, x_new], -2))``.

    Args:
        num_tokens: N, the number of targets.
        past: m, the number of tokens before the first target. There are m + N sources. The targets
            have positions m .. m + N - 1, the sources 0 .. m + N - 1.

    Raises:
        ValueError: if `num_tokens` < 0 or `past` < 0.

    Example:
        >>> import graphattn as ga
        >>> ga.causal_graph(1000).num_edges
        500500
        >>> ga.causal_graph(2, past=3).to_mask().int()
        tensor([[1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    num_tokens, past = as_int("num_tokens", num_tokens, 0), as_int("past", past, 0)
    return _causal(num_tokens, max(past + num_tokens - 1, 0), past)


def _causal(num_tokens: int, before: int, past: int) -> TokenGraph:
    """Return the graph of the last `num_tokens` rows of a causal band."""
    total = past + num_tokens
    band = Band(total, before, 0)
    if past == 0:
        return TokenGraph(structure=band)
    section = Section(band, past, total, 0, total)
    return TokenGraph(structure=section, starts=((past, 0),))


def complete_graph(num_tokens: int, *, self_loops: bool = True) -> TokenGraph:
    """Every token sees all tokens (global attention); without `self_loops`, all but itself.

    Raises:
        ValueError: if `num_tokens` < 0.

    Example:
        >>> import graphattn as ga
        >>> ga.complete_graph(4).num_edges, ga.complete_graph(4, self_loops=False).num_edges
        (16, 12)
    """
    num_tokens = as_int("num_tokens", num_tokens, 0)
    if self_loops:
        return TokenGraph(structure=Complete(num_tokens, num_tokens))
    reach = max(num_tokens - 1, 1)  # A band that reaches 0 tokens ahead would count as causal.
    return TokenGraph(structure=Band(num_tokens, reach, reach, 1, self_loops=False))


def block_window_graph(num_tokens: int, block_size: int, *, shift: int = 0) -> TokenGraph:
    """Every token sees all tokens of its own block of `block_size` tokens, including itself.

    Blocks do not overlap. With `shift`, blocks begin at shift, shift + block_size, ..., as in the
    shifted windows of Swin. The first and the last block are then cut, not wrapped around::

        block_size = 4, shift = 2, num_tokens = 9:    0 1 | 2 3 4 5 | 6 7 8

    Args:
        num_tokens: N.
        block_size: tokens per block, >= 1.
        shift: 0 <= shift < block_size.

    Raises:
        ValueError: if a size is too small or `shift` is not in [0, block_size).

    Example:
        >>> import graphattn as ga
        >>> ga.block_window_graph(9, block_size=4, shift=2).in_degree()
        tensor([2, 2, 4, 4, 4, 4, 3, 3, 3])
    """
    num_tokens = as_int("num_tokens", num_tokens, 0)
    block_size = as_int("block_size", block_size, 1)
    shift = as_int("shift", shift, 0)
    if shift >= block_size:
        raise ValueError(f"shift must be < block_size = {block_size}, got {shift}")
    return TokenGraph(structure=Blocks(num_tokens, block_size, shift))


def dilated_window_graph(
    num_tokens: int, window: int, dilation: int, *, self_loops: bool = True
) -> TokenGraph:
    """Every token sees `window` hops on each side of it, `dilation` tokens apart, and itself.

    ::

        window = 2, dilation = 3:    x . . x . . i . . x . . x

    Raises:
        ValueError: if `num_tokens` < 0, `window` < 1 or `dilation` < 1.

    Example:
        >>> import graphattn as ga
        >>> rowptr, source = ga.dilated_window_graph(13, window=2, dilation=3).csr()
        >>> source[rowptr[6] : rowptr[7]]  # what token 6 sees
        tensor([ 0,  3,  6,  9, 12])
    """
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    dilation = as_int("dilation", dilation, 1)
    return TokenGraph(structure=Band(num_tokens, window, window, dilation, bool(self_loops)))


def bipartite_window_graph(num_tokens: int, window: int) -> TokenGraph:
    """Target i sees the sources j of another track that are near it: ``|i - j| <= window``.

    It is Eq. 38 of the consensus paper. Both tracks have `num_tokens` tokens.

    Raises:
        ValueError: if `num_tokens` < 0 or `window` < 1.

    Example:
        >>> import graphattn as ga
        >>> ga.bipartite_window_graph(3, window=1).num_edges
        7
    """
    return window_path_graph(num_tokens, window, self_loops=True)


def bipartite_complete_graph(num_targets: int, num_sources: int) -> TokenGraph:
    """Every target sees every source, as in ordinary cross-attention.

    Raises:
        ValueError: if a size is negative.

    Example:
        >>> import graphattn as ga
        >>> ga.bipartite_complete_graph(num_targets=2, num_sources=3)
        TokenGraph(num_targets=2, num_sources=3, num_edges=6, structure=Complete)
    """
    num_targets = as_int("num_targets", num_targets, 0)
    num_sources = as_int("num_sources", num_sources, 0)
    return TokenGraph(structure=Complete(num_targets, num_sources))
