"""Graphs of FlexAttention's masks: a `mask_mod` or a `BlockMask`.

The code of a mask is never analysed: the mask is only called. A structure is guessed from the
values at few pairs, where bisection finds the first and the last source of each row. It is then
compared with the mask at all pairs, a few rows at a time. If it is wrong for any pair, the graph
becomes a list of edges.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphattn.graphs.arguments import as_int
from graphattn.graphs.builders.combine import batch as batch_of
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.recognize import ListedRows, structure_of_rows
from graphattn.graphs.structures.structure import Complete
from graphattn.graphs.token_graph import TokenGraph

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Pairs of a chunk. A call of create_mask costs as much as the evaluation of a million pairs.
AT_ONCE = 1 << 22
SAMPLES = 16  # rows that are evaluated before a structure is guessed


def from_mask_mod(
    mask_mod: MaskMod | BlockMask,
    num_targets: int | None = None,
    num_sources: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    verify: bool = True,
    device: torch.device | str | None = None,
) -> TokenGraph:
    """Make a graph from FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)`` or `BlockMask`.

    Target ``q_idx`` sees source ``kv_idx`` if the mask is True for this pair. The graph is
    structured if the mask is causal, complete, a window (causal or not, dilated or not, with or
    without the token itself), blocks, or a prefix that all tokens see followed by causal tokens. It
    is also structured if the mask consists of several such sequences, as document masks do. Such a
    mask gives a :func:`~graphattn.batch`, whose positions restart in every document. All other
    masks become lists of edges, and so do masks with N != M that are not True everywhere.

    The mask is evaluated for all pairs, as `create_mask` does, but a few million pairs at a time.
    So the edges are always those of the mask. A mask of 32,768 x 32,768 takes about ten seconds on
    one CPU core, or more if its function is long; `device` and `verify` can make it faster.

    Args:
        mask_mod: a function of four integer tensors without dimensions, or a `BlockMask`. The edges
            of a `BlockMask` are all pairs in its full blocks, and those pairs in its partial blocks
            for which its own ``mask_mod`` is True.
        num_targets: N; if None, the number of a `BlockMask`. It must be given for a function.
        num_sources: M; if None, the number of a `BlockMask`, and N for a function.
        batch: B packs the graphs of b = 0 .. B - 1 into one graph over [B * N] tokens. None is for
            masks that do not depend on b.
        heads: H compares the masks of h = 0 .. H - 1, which must be equal, because all heads share
            one graph. None is for masks whose function does not use h.
        verify: whether a structure is compared with the mask at all pairs. With False, a structure
            is returned if it fits the few pairs that were evaluated. A mask for which no structure
            fits is evaluated completely in both cases.
        device: the device of the graph and of the tensors that `mask_mod` reads; if None, "cpu" or
            the device of the `BlockMask`.

    Raises:
        ValueError: if `mask_mod` is a `score_mod`, returns something other than booleans, or cannot
            be called; if the masks of the heads differ, or it uses h without `heads` or b without
            `batch`; if a number is negative, missing, or more than a `BlockMask` covers.

    Example:
        >>> import torch, graphattn as ga
        >>> def sliding_window(b, h, q_idx, kv_idx):
        ...     return (q_idx >= kv_idx) & (q_idx - kv_idx <= 256)
        >>> ga.from_mask_mod(sliding_window, 1000)
        TokenGraph(num_tokens=1000, num_edges=224104, structure=Band)
        >>> document_id = torch.tensor([0, 0, 0, 1, 1])
        >>> def documents(b, h, q_idx, kv_idx):
        ...     return (q_idx >= kv_idx) & (document_id[q_idx] == document_id[kv_idx])
        >>> packed = ga.from_mask_mod(documents, 5)
        >>> packed == ga.batch([ga.causal_graph(3), ga.causal_graph(2)])
        True
    """
    mask = _Mask.of(mask_mod, num_targets, num_sources, device)
    entries = 1 if batch is None else as_int("batch", batch, 1)
    alike = 1 if heads is None else as_int("heads", heads, 1)
    reads_b, reads_h = mask.reads()
    for name, count, read, size in (
        ("batch", batch, reads_b, mask.of_blocks[0]),
        ("heads", heads, reads_h, mask.of_blocks[1]),
    ):
        if count is not None and size > 1 and (read or count > size) and count != size:
            raise ValueError(f"{name} must be {size}, the number of the BlockMask, got {count}")
    if reads_b and batch is None:
        raise ValueError(
            "batch must be given if mask_mod depends on b, the entry of the batch, got batch=None: "
            "with batch=B, the graphs of B entries are packed into one graph"
        )
    if reads_h and heads is None:
        raise ValueError(
            "heads must be given if mask_mod uses h, the head, got heads=None: all heads share one "
            "graph, and with heads=H it is checked that the masks of H heads are equal"
        )
    graphs = []
    for b in range(entries):
        if b == 0 or reads_b:
            for h in range(1, alike if reads_h else 1):
                mask.check_equal(b, h, every_row=verify)
            graphs.append(_graph(mask, b, verify))
        else:
            graphs.append(graphs[0])
    return graphs[0] if batch is None else batch_of(graphs)


class _Mask:
    """A mask_mod, its sizes, and its values at some pairs."""

    def __init__(self, mask_mod: MaskMod, sizes: tuple[int, int], device: torch.device) -> None:
        self.mask_mod, self.device = mask_mod, device
        self.num_targets, self.num_sources = sizes
        self._stored: tuple[tuple[int, int], Tensor] | None = None
        self.of_blocks = 1, 1  # entries and heads of a BlockMask

    @classmethod
    def of(cls, mask_mod: Any, num_targets: Any, num_sources: Any, device: Any) -> _Mask:
        """Make a mask from checked arguments."""
        from torch.nn.attention.flex_attention import BlockMask

        if isinstance(mask_mod, BlockMask):
            lengths = mask_mod.seq_lengths
            sizes = []
            for name, given, covered in zip(
                ("num_targets", "num_sources"),
                (num_targets, num_sources),
                lengths,
                strict=True,
            ):
                size = covered if given is None else as_int(name, given, 0)
                if size > covered:
                    raise ValueError(
                        f"{name} must be <= {covered}, the size of the BlockMask, got {size}"
                    )
                sizes.append(size)
            where = mask_mod.kv_indices.device if device is None else torch.device(device)
            mask = cls(_within_blocks(mask_mod.to(where)), (sizes[0], sizes[1]), where)
            entries, heads = mask_mod.kv_indices.shape[:2]
            mask.of_blocks = entries, heads
            return mask
        if not callable(mask_mod):
            raise ValueError(
                "mask_mod must be a function (b, h, q_idx, kv_idx) or a BlockMask, got "
                f"{type(mask_mod).__name__}"
            )
        if _takes_a_score(mask_mod):
            raise ValueError(
                "mask_mod must take (b, h, q_idx, kv_idx), got a function of five arguments: give "
                "what a score_mod adds to the scores as edge_bias"
            )
        if num_targets is None:
            raise ValueError(
                "num_targets must be an integer >= 0 if mask_mod is a function, got None"
            )
        N = as_int("num_targets", num_targets, 0)
        M = N if num_sources is None else as_int("num_sources", num_sources, 0)
        where = torch.empty(0, device="cpu" if device is None else device).device
        return cls(mask_mod, (N, M), where)

    def reads(self) -> tuple[bool, bool]:
        """Whether any operation of the mask takes b, and whether any takes h."""
        if not self.num_targets or not self.num_sources:
            return False, False
        b, h, q, kv = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(4))
        with _Readers(b, h) as readers:
            self._called(lambda: self.mask_mod(b, h, q, kv))
        return readers.are_read[0], readers.are_read[1]

    def at(self, rows: Tensor, columns: Tensor, b: int = 0, h: int = 0) -> Tensor:
        """Evaluate the mask at some pairs, elementwise."""
        if self._is_small:
            return self._whole(b, h)[rows, columns]

        def pair(b_: Tensor, h_: Tensor, q: Tensor, _: Tensor) -> Tensor:
            return self.mask_mod(b_ + b, h_ + h, rows[q], columns[q])

        return self._evaluated(pair, len(rows), 1)[:, 0]

    def rows(self, rows: Tensor, b: int = 0, h: int = 0) -> Tensor:
        """Evaluate the mask in some rows, [n, M]."""
        return self._whole(b, h)[rows] if self._is_small else self._of_rows(rows, b, h)

    @property
    def _is_small(self) -> bool:
        return self.num_targets * self.num_sources <= AT_ONCE

    def _whole(self, b: int, h: int) -> Tensor:
        """All values of a small mask; those of the last b and h are stored."""
        if self._stored is None or self._stored[0] != (b, h):
            rows = torch.arange(self.num_targets, device=self.device)
            self._stored = (b, h), self._of_rows(rows, b, h)
        return self._stored[1]

    def _of_rows(self, rows: Tensor, b: int, h: int) -> Tensor:
        def row(b_: Tensor, h_: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.mask_mod(b_ + b, h_ + h, rows[q], kv)

        return self._evaluated(row, len(rows), self.num_sources)

    def chunks(self, b: int, h: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the indices of all rows, a few at a time, and the values in these rows."""
        most = max(AT_ONCE // max(self.num_sources, 1), 1)
        for rows in torch.arange(self.num_targets, device=self.device).split(most):
            yield rows, self.rows(rows, b, h)

    def is_that_of(self, rows: ListedRows, b: int) -> bool:
        """Whether the mask has exactly the edges of these rows."""
        return all(torch.equal(rows.of(chunk), values) for chunk, values in self.chunks(b))

    def check_equal(self, b: int, h: int, *, every_row: bool) -> None:
        """Raise ValueError unless head h has the same mask as head 0."""
        if every_row:
            pairs = zip(self.chunks(b), self.chunks(b, h), strict=True)
        else:
            rows = self.samples()
            pairs = zip([(rows, self.rows(rows, b))], [(rows, self.rows(rows, b, h))], strict=True)
        for (rows, first), (_, other) in pairs:
            if not torch.equal(first, other):
                place = (first != other).nonzero()[0]
                raise ValueError(
                    "mask_mod must be the same for all heads, which share one graph, but heads 0 "
                    f"and {h} differ at q_idx = {int(rows[place[0]])}, kv_idx = {int(place[1])}"
                )

    def samples(self) -> Tensor:
        """Choose some rows, spread over all of them and including the first and the last."""
        steps = torch.linspace(0, 1, SAMPLES, dtype=torch.float64)
        rows = (steps.sqrt() * (self.num_targets - 1)).round().long().unique()
        return rows.to(self.device)

    def _evaluated(self, function: MaskMod, rows: int, columns: int) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask

        values = self._called(lambda: create_mask(function, 1, 1, rows, columns, self.device))
        if values.dtype != torch.bool:
            raise ValueError(f"mask_mod must return booleans, got {values.dtype}")
        return values[0, 0]

    def _called(self, call: Callable[[], Tensor]) -> Tensor:
        try:
            with torch.no_grad():
                return call()
        except Exception as error:
            raise ValueError(
                "mask_mod must be a function (b, h, q_idx, kv_idx) of integer tensors without "
                f"dimensions on device {str(self.device)!r} (the argument device=), with q_idx < "
                f"{self.num_targets} and kv_idx < {self.num_sources}. When it was called with "
                f"these, it raised {type(error).__name__}: {error}"
            ) from error


class _Readers(TorchFunctionMode):
    """A mode that records whether operations read some given tensors.

    Operations that only create tensors of the same dtype and device, such as ``zeros_like``, do not
    count.
    """

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self.watched, self.are_read = watched, [False] * len(watched)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if not (name.startswith("new_") or name.endswith("_like") or name == "__get__"):
            given = [*tree_leaves(args), *tree_leaves(kwargs or {})]
            for k, tensor in enumerate(self.watched):
                self.are_read[k] |= any(item is tensor for item in given)
        return func(*args, **(kwargs or {}))


def _takes_a_score(function: Callable[..., Any]) -> bool:
    """Whether a function has five arguments without a default, as a score_mod has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) >= 5


def _within_blocks(blocks: BlockMask) -> MaskMod:
    """Make a mask_mod of a BlockMask: its own in partial blocks, True in full ones."""
    height, width = blocks.BLOCK_SIZE
    partial = _dense(blocks.kv_num_blocks, blocks.kv_indices)
    full = torch.zeros_like(partial)
    if blocks.full_kv_num_blocks is not None:
        full = _dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for dim in (0, 1):  # If all entries (or heads) have the same blocks, one of them is enough.
        one = [x.narrow(dim, 0, min(1, x.shape[dim])) for x in (partial, full)]
        if torch.equal(one[0].expand_as(partial), partial) and torch.equal(
            one[1].expand_as(full), full
        ):
            partial, full = one
    within_partial, (B, H) = blocks.mask_mod, partial.shape[:2]

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry = b.new_zeros(()) if B == 1 else b
        head = h.new_zeros(()) if H == 1 else h
        place = entry, head, q_idx // height, kv_idx // width
        return full[place] | (partial[place] & within_partial(b, h, q_idx, kv_idx))

    return within


def _dense(num_blocks: Tensor, indices: Tensor | None) -> Tensor:
    """Mark the blocks that are listed, bool [B, H, rows, columns]."""
    assert indices is not None
    if indices.dim() != 4:
        raise ValueError(
            f"mask_mod must be a BlockMask [B, H, rows, columns], got one of shape "
            f"{list(indices.shape)}"
        )
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    places = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return places.scatter_add_(-1, indices.long(), listed.int()) > 0


def _graph(mask: _Mask, b: int, verify: bool) -> TokenGraph:
    """Return the graph of one entry: a structure if one fits, or a list of all its edges."""
    N, M = mask.num_targets, mask.num_sources
    if not N or not M:
        return TokenGraph(structure=Complete(N, M), device=mask.device)
    rows = _guess(mask, b)
    structure = None if rows is None else structure_of_rows(rows)
    if rows is not None and structure is not None and (not verify or mask.is_that_of(rows, b)):
        sizes = None
        if isinstance(structure, Parts):
            sizes = tuple((part.num_targets, part.num_sources) for part in structure.parts)
        return TokenGraph(structure=structure, sizes=sizes, device=mask.device)
    edges = []
    for chunk, values in mask.chunks(b):
        row, source = values.nonzero().T
        edges.append(torch.stack([source, chunk[row]]))
    edge_index = torch.cat(edges, dim=1)
    return TokenGraph(edge_index=edge_index, num_targets=N, num_sources=M)


def _guess(mask: _Mask, b: int) -> ListedRows | None:
    """Guess the first and the last source of every row.

    The guess assumes that every row sees a run of tokens, or every d-th token, around itself. It
    may be wrong. For N != M, the result is None unless all sampled rows see all sources.
    """
    N, M, device = mask.num_targets, mask.num_sources, mask.device
    samples = mask.samples()
    seen = mask.rows(samples, b)
    if N != M:
        return ListedRows.all_of(N, M, device) if bool(seen.all()) else None
    i = torch.arange(N, device=device)
    itself = mask.at(i, i, b)
    loops = bool(itself.any())
    row, source = seen.nonzero().T
    step = max(math.gcd(*(source - samples[row]).abs().unique().tolist()), 1)
    # Bisection for the number of hops that each token sees to the left and to the right. It starts
    # from 0 hops, as if every token saw itself.
    move = torch.cat([torch.full_like(i, -step), torch.full_like(i, step)])
    target = torch.cat([i, i])
    low, high = torch.zeros_like(move), torch.cat([i // step, (N - 1 - i) // step])
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        inside = mask.at(target, target + move * middle, b)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle - 1)
    first, last = (target + move * low).split(N)
    if loops:  # If some tokens see themselves, a token that does not is assumed to see nothing.
        last = torch.where(itself, last, first - 1)
    return ListedRows(first, last, step, loops, M)
