"""Agreement of all ranks, before any of them sends: on the graph, and on every call of a layer.

Collectives need tensors of equal shapes and dtypes. If one rank has others, or raises an error
before it sends, then the others wait for it, or take its bytes for something else. So all ranks
first compare a hash of what they are about to do, by one all-reduce of two integers. Only if the
hashes differ, they exchange what is behind them, and all of them raise an error.

A rank that dies or hangs later is left to the process group: gloo raises an error when a connection
closes, every backend does so after its time-out, and the agent of torchrun ends all processes when
one fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graphattn.graphs.edges.storage import StoredGraph

HASHED_AT_ONCE = 1 << 22  # numbers of a tensor
LONGEST = 100  # letters of a value in a message
GAP = "<size>"  # in a text

# What a rank is about to do, as texts by name: "x" -> "float32 [2, tokens, 8]".
Facts = Mapping[str, str]


class RankFailure(RuntimeError):
    """Error of a rank that cannot go on, because another rank of its group raised an error."""


def graph_digest(graph: StoredGraph) -> str:
    """Return a hash of a graph, which two graphs share if and only if they are equal.

    It takes O(1) for a structured graph, and reads the table or list of another one. It does not
    depend on the device, or on whether edges were listed. Graphs that are stored in another form
    are different, even if their edges are equal, because layers compute them in another way.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = [graph.code]
    if graph.listed is not None:
        tensors.append(graph.listed)
    if graph.own_positions is not None:
        sides = enumerate(graph.own_positions)
        # Positions that only count the tokens are equal to none.
        if not all(torch.equal(x, graph._counted(side)) for side, x in sides):
            tensors.extend(graph.own_positions)
    for x in tensors:
        digest.update(repr(list(x.shape)).encode())
        for part in x.reshape(-1).split(HASHED_AT_ONCE):
            digest.update(part.to("cpu", torch.int64).numpy())  # whatever the width is
    return digest.hexdigest()


class OpenFacts(NamedTuple):
    """Facts whose texts have gaps for sizes, which torch.compile may not know while it traces.

    Attributes:
        texts: a name and a text, and so on.
        sizes: the numbers for all gaps, in their order.
    """

    texts: list[str]
    sizes: list[int]

    def filled(self) -> dict[str, str]:
        """Return the facts with all sizes."""
        sizes, names, texts = iter(self.sizes), self.texts[::2], self.texts[1::2]
        whole = [text.split(GAP) for text in texts]
        filled = [first + "".join(f"{next(sizes)}{x}" for x in rest) for first, *rest in whole]
        return dict(zip(names, filled, strict=True))


def facts_of_call(
    layer: str, exchanged: Sequence[str], given: Mapping[str, Any], *, both: bool
) -> OpenFacts:
    """Return what must be equal on all ranks in a call of a layer.

    `exchanged` names the arguments whose rows travel. Masks and positions are those of sources, and
    those of targets, too, if `both`; consensus asks whether these positions are the same tensor.
    """
    facts = OpenFacts(["layer", layer], [])
    for name in exchanged:
        x = given.get(name)
        if name not in ("valid", "positions"):
            describe(facts, name, x, -2)
            continue
        of_targets, of_sources = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
        describe(facts, f"{name} of sources", of_sources, -1)
        if both and not (name == "positions" and of_targets is of_sources):
            describe(facts, f"{name} of targets", of_targets, -1)
    x = given.get("x")
    device = x.device.type if isinstance(x, Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        facts.texts.extend(["autocast", dtype])
    return facts


def described(x: Any, dim: int) -> str:
    """Return the dtype and shape of an argument, whose dimension `dim` < 0 counts the tokens."""
    facts = OpenFacts([], [])
    describe(facts, "x", x, dim)
    return facts.filled()["x"]


def describe(facts: OpenFacts, name: str, x: Any, dim: int) -> None:
    """Add to facts what :func:`described` returns."""
    if not isinstance(x, Tensor):
        facts.texts.extend([name, "None" if x is None else type(x).__name__])
        return
    sizes = [GAP] * x.dim()
    numbers = list(x.shape)
    if x.dim() >= -dim:
        sizes[dim] = "tokens"
        del numbers[dim]
    facts.sizes.extend(numbers)
    facts.texts.extend([name, f"{str(x.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"])


_CPU_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# The call of a layer that this rank is in, until the ranks of the group have agreed on it.
_CALLS: WeakKeyDictionary[Any, Facts] = WeakKeyDictionary()


@contextmanager
def calling(group: Any, facts: Facts) -> Iterator[None]:
    """Return a context for a call of a layer, in which all ranks agree before something travels.

    The first exchange of rows calls :func:`agree_on_call`. If this rank raises an error before
    that, the others, which wait there, raise :class:`RankFailure`.
    """
    _CALLS[group] = facts
    try:
        yield
    except Exception as error:
        agree_on_call(group, error)
        raise
    finally:
        _CALLS.pop(group, None)


def agree_on_call(group: Any, error: Exception | None = None) -> None:
    """Agree on the call that all ranks are in, unless they have agreed on it already.

    It does nothing while torch.compile traces, which :func:`agree_in_graph` is for.
    """
    if torch.compiler.is_compiling():
        return
    facts = _CALLS.pop(group, None)
    if facts is not None:
        agree(group, facts, error)


# The calls that torch.compile is tracing, each a list of its facts until its first exchange.
_TRACED: list[list[OpenFacts]] = []


@contextmanager
def tracing(facts: OpenFacts) -> Iterator[None]:
    """Return a context for a call of a layer while torch.compile traces it.

    If the compiler gives up within the context, the call runs again under :func:`calling`.
    """
    _TRACED.append([facts])
    try:
        yield
    finally:
        _TRACED.pop()


def facts_in_graph() -> OpenFacts | None:
    """Return the facts on which ranks have to agree at an exchange that torch.compile traces.

    None if they have agreed. The facts are empty if the call of the layer itself was not traced,
    but runs under :func:`calling`.
    """
    if not _TRACED:
        return OpenFacts([], [])
    return _TRACED[-1].pop() if _TRACED[-1] else None


def agree_in_graph(rows: Tensor, facts: OpenFacts | None, group: Any) -> None:
    """Agree on a call in a compiled function, before some rows are sent.

    It is an operator that is said to change the rows, so that it comes before their exchange.
    """
    if facts is not None:
        _agree_on(rows, facts.texts, facts.sizes, group.group_name)


@torch.library.custom_op(
    "graphattn::agree",
    mutates_args=("rows",),
    schema="(Tensor(a!) rows, str[] texts, SymInt[] sizes, str group_name) -> ()",
)
def _agree_on(rows: Tensor, texts: list[str], sizes: list[int], group_name: str) -> None:
    from torch.distributed.distributed_c10d import _resolve_process_group

    group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a str in torch 2.11
    if texts:
        agree(group, OpenFacts(texts, sizes).filled())
    else:
        agree_on_call(group)


@_agree_on.register_fake
def _(rows: Tensor, texts: list[str], sizes: list[int], group_name: str) -> None:
    pass


def agree(group: Any, facts: Facts, error: Exception | None = None) -> None:
    """Check that all ranks of a group have equal facts, and that none of them has an error.

    Every rank must call it. It raises an error on every rank or on none, except that a rank with
    an error of its own is expected to raise that.

    Args:
        group: the process group.
        facts: texts by name, such as ``{"the number of tokens": "100"}``.
        error: the error that this rank will raise; None if there is none.

    Raises:
        RankFailure: which names the other ranks with an error, and what it was.
        ValueError: which names every fact that differs, and which ranks have what.
    """
    import torch.distributed as dist

    text = None if error is None else f"{type(error).__name__}: {error}"
    if is_equal_on_all_ranks(group, (facts, text)):
        return
    group = _cpu_group(group)
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, (dict(facts), text), group)
    if error is not None:
        return
    if errors := [f"rank {rank} raised {text}" for rank, (_, text) in enumerate(by_rank) if text]:
        raise RankFailure("; ".join(errors))
    raise ValueError("; ".join(_differences([facts_of_rank for facts_of_rank, _ in by_rank])))


def is_equal_on_all_ranks(group: Any, value: object) -> bool:
    """Whether the ranks of a group, which all call it, have values with the same ``repr``."""
    import torch.distributed as dist

    digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    largest = torch.tensor([number, -number], device="cpu")
    dist.all_reduce(largest, dist.ReduceOp.MAX, _cpu_group(group))
    return int(largest.sum()) == 0  # the largest number of all ranks is the smallest one, too


def _cpu_group(group: Any) -> Any:
    """Return a group of the same ranks for tensors on CPUs, so that no GPU has to be waited for."""
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        return group
    if group not in _CPU_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _CPU_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _CPU_GROUPS[group]


def _differences(by_rank: Sequence[Facts]) -> Iterator[str]:
    """Say which facts differ, and which ranks have what."""
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            ranks.setdefault(_shortened(facts.get(name, "none")), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {_named(of)}" for value, of in ranks.items())
            yield f"{name} must be equal on all ranks, got {values}"


def _shortened(text: str) -> str:
    """Return a text; if it is long, its beginning and a hash."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"


def _named(ranks: list[int]) -> str:
    """Name ranks: "rank 1", "ranks 0 and 2", "ranks 0, 1, 2 and 61 others"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
