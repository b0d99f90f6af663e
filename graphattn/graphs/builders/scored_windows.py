"""Graphs of the best sources of a window, by scores that a model learns."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph


@overload
def scored_window_graph(
    scores: Tensor, k: int, *, causal: bool = False, return_scores: Literal[False] = False
) -> TokenGraph: ...


@overload
def scored_window_graph(
    scores: Tensor, k: int, *, causal: bool = False, return_scores: Literal[True]
) -> tuple[TokenGraph, Tensor]: ...


def scored_window_graph(
    scores: Tensor, k: int, *, causal: bool = False, return_scores: bool = False
) -> TokenGraph | tuple[TokenGraph, Tensor]:
    """Every token sees the `k` sources of its window that have the highest scores.

    ``scores[i, c]`` is the score of source ``i + c - w`` for target i, so column w is the token
    itself. Sources before the first or after the last token do not exist, whatever their score, and
    a source with the score -inf is never seen. Of equal scores, the source with the smaller index
    comes first. A token with fewer than `k` sources left sees all of them.

    Consensus layers in the code published by the authors of the consensus paper choose their edges
    so. The choice itself has no gradient. To learn the scores, give those of the edges to the
    layer, too: as ``edge_bias=kept[:, None].expand(-1, heads)`` to attention, or as
    ``edge_features=kept[:, None]`` to a consensus layer made with ``edge_features=1``.

    Args:
        scores: floating-point [N, 2 w + 1]; [*, N, 2 w + 1] for several sequences of one length,
            whose graph is packed, as from :func:`~graphattn.batch`.
        k: sources per token, >= 1.
        causal: whether only the token itself and earlier ones (columns 0 .. w) are candidates.
            (If scores depend on later tokens, so does the choice.)
        return_scores: whether the scores of the edges are returned as well, [E], in the order of
            ``graph.edge_index``, with the gradient of `scores`.

    Returns:
        A graph over N tokens (all tokens of all sequences), stored as a table
        (:attr:`TokenGraph.neighbors`).

    Raises:
        ValueError: if `scores` is not such a tensor, its width is even, a score is NaN, or k < 1.
            (On a GPU, NaN is not looked for, which would wait for the device. It counts as the
            largest score.)

    Example:
        >>> import torch, graphattn as ga
        >>> scores = torch.tensor([[0.0, 1.0, 3.0], [1.0, 3.0, 2.0], [2.0, 1.0, 0.0]])
        >>> graph, kept = ga.scored_window_graph(scores.requires_grad_(), k=2, return_scores=True)
        >>> graph.edge_index
        tensor([[0, 1, 1, 2, 1, 2],
                [0, 0, 1, 1, 2, 2]])
        >>> kept
        tensor([1., 3., 3., 2., 2., 1.], grad_fn=<IndexBackward0>)
        >>> layer, x = ga.nn.DotProductAttention(8, heads=2), torch.randn(3, 8)
        >>> layer(x, graph, edge_bias=kept[:, None].expand(-1, 2)).sum().backward()
        >>> scores.grad.shape
        torch.Size([3, 3])
    """
    _check_scores(scores)
    k, causal = as_int("k", k, 1), bool(causal)
    *batch, N, width = scores.shape
    w, sequences = width // 2, scores.shape[:-2].numel()
    device = scores.device
    column = torch.arange(width, device=device)
    source = torch.arange(N, device=device)[:, None] + column - w
    exists = (source >= 0) & (source < N)
    if causal:
        exists = exists & (column <= w)
    given = scores.detach().masked_fill(~exists, -torch.inf)
    _check_numbers(given)
    given = given.reshape(sequences, N, width)
    best = given.argsort(dim=-1, descending=True, stable=True)[..., :k]
    kept = given.gather(-1, best) > -torch.inf
    best = best.masked_fill(~kept, -1).sort(dim=-1).values  # in order of sources, -1 first
    first = N * torch.arange(sequences, device=device)[:, None, None]
    table = torch.where(best < 0, -1, best - w + torch.arange(N, device=device)[:, None] + first)
    graph = TokenGraph(
        neighbors=table.flatten(0, 1),
        num_targets=sequences * N,
        num_sources=sequences * N,
        sizes=((N, N),) * sequences if batch else None,
        is_causal=causal,
        has_causal_part=causal and N > 1,
    )
    if not return_scores:
        return graph
    of_table = scores.reshape(sequences, N, width).gather(-1, best.clamp(min=0))
    return graph, of_table[best >= 0]


def _check_scores(scores: Any) -> None:
    """Check scores [*, N, 2 w + 1]."""
    if not isinstance(scores, Tensor):
        raise ValueError(f"scores must be a tensor, got {type(scores).__name__}")
    if scores.dim() < 2 or scores.shape[-1] % 2 == 0:
        raise ValueError(
            "scores must have shape [*, N, 2 w + 1], an odd number of columns for the offsets -w "
            f".. w, got {list(scores.shape)}"
        )
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating-point, got {scores.dtype}")


def _check_numbers(scores: Tensor) -> None:
    """Refuse NaN among the scores of sources that exist."""
    bad = scores.isnan()
    if scores.device.type == "cpu" and not torch.compiler.is_compiling() and bad.any():
        place = bad.nonzero()[0].tolist()
        raise ValueError(
            f"scores must not be NaN, got scores{place} = nan: use -inf for a source that must not "
            "be seen"
        )
