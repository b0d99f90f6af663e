"""The check that all ranks shard equal graphs with equal options, before any of them waits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.edges.storage import StoredGraph

AT_ONCE = 1 << 22  # numbers of a tensor that are hashed at once
LONGEST = 60  # letters of a value in a message


def graph_digest(graph: StoredGraph) -> str:
    """Return a hash of a graph, which two graphs share if and only if they are equal.

    It takes O(1) for a structured graph, and reads the table or list of another one. It does not
    depend on the device, or on whether edges were listed. Graphs that are stored in another form
    are different, even if their edges are equal, because layers compute them in another way.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.failures.agreement import graph_digest
        >>> a, b = ga.causal_graph(1 << 40), ga.causal_graph(1 << 40)
        >>> graph_digest(a) == graph_digest(b), graph_digest(a) == graph_digest(ga.causal_graph(9))
        (True, False)
    """
    found = hashlib.blake2b(digest_size=16)
    tensors = [graph.code]
    if graph.listed is not None:
        tensors.append(graph.listed)
    if graph.own_positions is not None:
        sides = enumerate(graph.own_positions)
        # Positions that only count the tokens are equal to none.
        if not all(torch.equal(x, graph._counted(side)) for side, x in sides):
            tensors.extend(graph.own_positions)
    for x in tensors:
        _add(found, x)
    return found.hexdigest()


def _add(found: Any, x: Tensor) -> None:
    """Hash the shape and the numbers of a tensor, as int64 whatever the width is."""
    found.update(repr(list(x.shape)).encode())
    for part in x.reshape(-1).split(AT_ONCE):
        found.update(part.to("cpu", torch.int64).numpy())


def agree(
    group: Any, facts: Mapping[str, object], error: BaseException | None = None, note: Any = None
) -> list[Any]:
    """Check that all ranks of a group have equal facts, and that none of them found an error.

    Every rank must call it. It takes part in one collective, and then either returns on every rank,
    or raises on every rank.

    Args:
        group: the process group.
        facts: values with a short ``repr`` by name, such as ``{"the number of tokens": 100}``.
        error: what this rank has to say against it; None if nothing.
        note: what this rank tells the others beside that.

    Returns:
        The notes of all ranks.

    Raises:
        ValueError: which names the ranks with an error and what it was, or every fact that differs
            and which ranks have what.

    Example:
        Every rank learns of the error of one::

            error = None if window > 0 else ValueError(f"window must be positive, got {window}")
            agree(group, {"the graph": graph_digest(graph)}, error)
    """
    import torch.distributed as dist

    mine = {name: _short(value) for name, value in facts.items()}
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (mine, None if error is None else said(error), note), group)
    texts = {text for _, text, _ in told}
    if error is not None and len(texts) == 1:  # all ranks say the same
        raise error
    wrong = [f"rank {rank} raised {text}" for rank, (_, text, _) in enumerate(told) if text]
    if not wrong:
        names = dict.fromkeys(name for of_rank, _, _ in told for name in of_rank)
        for name in names:
            values = [of_rank.get(name, "nothing") for of_rank, _, _ in told]
            if len(set(values)) > 1:
                wrong.append(
                    f"{name} must be equal on all ranks, got {by_value(dict(enumerate(values)))}"
                )
    if wrong:
        raise ValueError("; ".join(wrong)) from error
    return [found for _, _, found in told]


def said(error: BaseException) -> str:
    """Return the class and the message of an error, as the last line of a traceback."""
    return f"{type(error).__name__}: {error}"


def _short(value: object) -> str:
    """Return the ``repr`` of a value; if it is long, its beginning and a hash."""
    text = repr(value)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def by_value(values: Mapping[int, str]) -> str:
    """Say which ranks have which value, from the values by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_named(of)}" for value, of in ranks.items())


def _named(ranks: list[int]) -> str:
    """Name ranks: "rank 1", "ranks 0 and 2", "ranks 0, 1, 2 and 61 others"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
