"""Windows with global and random tokens: Longformer, also a causal one, and BigBird."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.structures.composites import Parts, RandomSources, Section, union_of
from graphattn.graphs.structures.structure import Band, Complete, GlobalTokens, GraphStructure
from graphattn.graphs.token_graph import TokenGraph


def longformer_graph(
    num_tokens: int, window: int, global_tokens: Iterable[int], *, dilation: int = 1
) -> TokenGraph:
    """Every token sees a window on each side; global tokens see all tokens and are seen by all.

    This is the pattern of Longformer (Beltagy et al., 2020). Every token sees itself. The window
    may be dilated.

    Args:
        num_tokens: N.
        window: hops on each side, >= 1 (a "Longformer window of 512" is 256 on each side).
        global_tokens: indices of the global tokens, such as ``[0]``; may be empty.
        dilation: the distance from one hop to the next, in tokens, >= 1.

    Raises:
        ValueError: if a size is too small, or an entry of `global_tokens` is not in
            0 .. num_tokens - 1.

    Example:
        >>> import graphattn as ga
        >>> ga.longformer_graph(5, window=1, global_tokens=[0]).to_mask().int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    return TokenGraph(
        structure=union_of(_window_and_global_tokens(num_tokens, window, global_tokens, dilation))
    )


def causal_longformer_graph(num_tokens: int, window: int, num_global: int) -> TokenGraph:
    """Every token sees itself, the last tokens, and those of the first tokens that are before it.

    This is the pattern of Longformer (Beltagy et al., 2020) without the edges to later tokens, as
    for a language model: token i sees token j <= i if i - window < j or j < num_global. A global
    token sees all tokens before it and itself. ::

        window = 3, num_global = 2:    x x . . x x i . . .

    Here `window` counts keys, including the token itself, as in
    :func:`~graphattn.causal_window_graph`; in :func:`~graphattn.longformer_graph` it counts hops.

    Args:
        num_tokens: N.
        window: keys of the window of every token, >= 1.
        num_global: how many of the first tokens are global, 0 <= num_global <= num_tokens.

    Returns:
        A structured causal graph; no edge is listed.

    Raises:
        ValueError: if a size is too small, or `num_global` is larger than `num_tokens`.

    Example:
        >>> import graphattn as ga
        >>> ga.causal_longformer_graph(6, window=2, num_global=1).to_mask().int()
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [1, 0, 1, 1, 0, 0],
                [1, 0, 0, 1, 1, 0],
                [1, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    N, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    num_global = as_int("num_global", num_global, 0)
    if num_global > N:
        raise ValueError(f"num_global must be <= num_tokens = {N}, got {num_global}")
    if num_global == 0:
        return TokenGraph(structure=Band(N, window - 1, 0))
    if num_global == N:
        return TokenGraph(structure=Band(N, N - 1, 0))
    # The first columns of a causal graph, and beside them the tokens that no column has.
    columns = Section(Band(N, N - 1, 0), 0, N, 0, num_global)
    first_tokens = Parts((columns, Complete(0, N - num_global)))
    return TokenGraph(structure=union_of([first_tokens, Band(N, window - 1, 0)]))


def bigbird_graph(
    num_tokens: int, window: int, num_random: int, global_tokens: Iterable[int], seed: int
) -> TokenGraph:
    """Every token sees Longformer's pattern and `num_random` random tokens.

    This is the pattern of BigBird (Zaheer et al., 2020), token by token instead of by blocks. The
    random sources of a token are drawn without replacement from the tokens that it does not see
    otherwise. With the same arguments and the same `seed`, they are always the same.

    Args:
        num_tokens: N.
        window: tokens on each side, >= 1.
        num_random: random sources per token, >= 0. A token that has fewer other tokens left sees
            all of them.
        global_tokens: indices of the global tokens; may be empty.
        seed: seed of the random numbers, >= 0.

    Raises:
        ValueError: if a size is too small, or an entry of `global_tokens` is not in
            0 .. num_tokens - 1.

    Example:
        >>> import graphattn as ga
        >>> ga.bigbird_graph(100, window=2, num_random=3, global_tokens=[0], seed=0).in_degree()[50]
        tensor(9)
    """
    parts = _window_and_global_tokens(num_tokens, window, global_tokens, 1)
    num_random, seed = as_int("num_random", num_random, 0), as_int("seed", seed, 0)
    num_random = min(num_random, parts[0].num_targets)
    if num_random:
        parts = [*parts, RandomSources(union_of(parts), num_random, seed)]
    return TokenGraph(structure=union_of(parts))


def _window_and_global_tokens(
    num_tokens: int, window: int, global_tokens: Iterable[int], dilation: int
) -> list[GraphStructure]:
    """List the structures: global tokens first, so that an edge of both counts as theirs."""
    num_tokens, window = as_int("num_tokens", num_tokens, 0), as_int("window", window, 1)
    dilation = as_int("dilation", dilation, 1)
    band = Band(num_tokens, window, window, dilation)
    tokens = _as_tokens(global_tokens, num_tokens)
    return [GlobalTokens(num_tokens, tokens), band] if tokens else [band]


def _as_tokens(global_tokens: Any, num_tokens: int) -> tuple[int, ...]:
    if isinstance(global_tokens, Tensor) and not global_tokens.dtype.is_floating_point:
        if global_tokens.dtype == torch.bool:
            raise ValueError(
                "global_tokens must be token indices, got the mask "
                f"{global_tokens.tolist()}: use mask.nonzero().flatten()"
            )
        global_tokens = global_tokens.tolist()
    try:
        tokens = sorted({as_int("global_tokens", token, 0) for token in global_tokens})
    except TypeError:
        raise ValueError(
            f"global_tokens must be token indices such as [0] or range(2), got {global_tokens!r}"
        ) from None
    if tokens and tokens[-1] >= num_tokens:
        allowed = f"in 0 .. {num_tokens - 1}" if num_tokens else "empty if num_tokens is 0"
        raise ValueError(f"global_tokens must be {allowed}, got {tokens[-1]}")
    return tuple(tokens)
