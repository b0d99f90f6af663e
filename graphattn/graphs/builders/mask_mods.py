"""Graphs of FlexAttention's masks: a `mask_mod` or a `BlockMask` is evaluated, never read.

A shape is guessed from few evaluations (what a row sees is looked for by bisection), and compared
with the mask at all pairs, a few rows at a time: a guess that is wrong anywhere is dropped.
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
AT_ONCE = 1 << 22  # pairs of a chunk: a call of create_mask costs as much as a million of them
SAMPLES = 16  # rows that are looked at before a shape is guessed


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
    """A graph of FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``, or of its `BlockMask`.

    Target ``q_idx`` sees source ``kv_idx`` where it is True. The graph is structured where the mask
    has a known shape: causal, complete, a window (causal or not, dilated, with or without oneself),
    blocks, a prefix that all see before causal tokens, or several of these side by side, as
    document masks are. Those become a :func:`~graphattn.batch`, whose positions restart with every
    document. All other masks, and those of unequally many targets and sources that leave anything
    out, become lists of edges.

    The mask is evaluated as `create_mask` does, on all pairs, a few million at a time, so that what
    is returned is the mask, whatever it was taken for. A mask of 32,768 x 32,768 takes some ten
    seconds of one CPU core, or more where its function is long; `device` and `verify` shorten it.

    Args:
        mask_mod: a function of four integer tensors without dimensions, or a `BlockMask`: of that
            the pairs in full blocks, and those in partial blocks that its own ``mask_mod`` allows.
        num_targets: N; of a `BlockMask` its own number where None.
        num_sources: M; N where None, of a `BlockMask` its own number.
        batch: B packs the graphs of b = 0 .. B - 1 side by side, over [B * N] tokens. None is for
            masks that do not depend on b.
        heads: H compares the masks of h = 0 .. H - 1, which must be the same: all heads share a
            graph. None is for masks that do not look at h.
        verify: False returns the shape that a mask seems to have without looking at all pairs;
            masks that seem to have none are evaluated completely all the same.
        device: where the tensors that `mask_mod` reads lie, and the graph will; "cpu", or that of
            the `BlockMask`, where None.

    Raises:
        ValueError: if `mask_mod` is a `score_mod`, gives something else than booleans, or cannot be
            called; if it depends on h, or on b without `batch`; if a number is negative, missing,
            or more than a `BlockMask` covers.

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
    for name, count, read, own in (
        ("batch", batch, reads_b, mask.of_blocks[0]),
        ("heads", heads, reads_h, mask.of_blocks[1]),
    ):
        if count is not None and own > 1 and (read or count > own) and count != own:
            raise ValueError(f"{name} must be {own}, as many as the BlockMask has, got {count}")
    if reads_b and batch is None:
        raise ValueError(
            "mask_mod depends on b, the entry of the batch, and a graph is shared by all of them: "
            "give batch=B for the graphs of B entries side by side, got batch=None"
        )
    if reads_h and heads is None:
        raise ValueError(
            "mask_mod depends on h, the head, and all heads share a graph: give heads=H where the "
            "masks of all H heads are equal after all, got heads=None"
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
        self._kept: tuple[tuple[int, int], Tensor] | None = None
        self.of_blocks = 1, 1  # entries and heads of a BlockMask

    @classmethod
    def of(cls, mask_mod: Any, num_targets: Any, num_sources: Any, device: Any) -> _Mask:
        """Make a mask from checked arguments."""
        from torch.nn.attention.flex_attention import BlockMask

        if isinstance(mask_mod, BlockMask):
            own = mask_mod.seq_lengths
            sizes = []
            for name, given, covered in zip(
                ("num_targets", "num_sources"), (num_targets, num_sources), own, strict=True
            ):
                size = covered if given is None else as_int(name, given, 0)
                if size > covered:
                    raise ValueError(
                        f"{name} must be <= {covered}, which the BlockMask covers, got {size}"
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
                "mask_mod must take (b, h, q_idx, kv_idx), got a function of five arguments: what "
                "a score_mod adds to scores is an edge_bias"
            )
        if num_targets is None:
            raise ValueError("num_targets must be given with a mask_mod, got None")
        N = as_int("num_targets", num_targets, 0)
        M = N if num_sources is None else as_int("num_sources", num_sources, 0)
        where = torch.empty(0, device="cpu" if device is None else device).device
        return cls(mask_mod, (N, M), where)

    def reads(self) -> tuple[bool, bool]:
        """Whether its value can depend on b, and on h: whether any operation takes them."""
        if not self.num_targets or not self.num_sources:
            return False, False
        b, h, q, kv = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(4))
        with _Readers(b, h) as readers:
            self._called(lambda: self.mask_mod(b, h, q, kv))
        return readers.found[0], readers.found[1]

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
        """All values of a small mask, kept until another one is asked for."""
        if self._kept is None or self._kept[0] != (b, h):
            rows = torch.arange(self.num_targets, device=self.device)
            self._kept = (b, h), self._of_rows(rows, b, h)
        return self._kept[1]

    def _of_rows(self, rows: Tensor, b: int, h: int) -> Tensor:
        def row(b_: Tensor, h_: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.mask_mod(b_ + b, h_ + h, rows[q], kv)

        return self._evaluated(row, len(rows), self.num_sources)

    def chunks(self, b: int, h: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows, a few at a time, and the values there."""
        most = max(AT_ONCE // max(self.num_sources, 1), 1)
        for rows in torch.arange(self.num_targets, device=self.device).split(most):
            yield rows, self.rows(rows, b, h)

    def is_that_of(self, rows: ListedRows, b: int) -> bool:
        """Whether all pairs are edges exactly where the rows say so."""
        return all(torch.equal(rows.of(own), values) for own, values in self.chunks(b))

    def check_equal(self, b: int, h: int, *, every_row: bool) -> None:
        """Head h sees what head 0 sees."""
        if every_row:
            pairs = zip(self.chunks(b), self.chunks(b, h), strict=True)
        else:
            rows = self.samples()
            pairs = zip([(rows, self.rows(rows, b))], [(rows, self.rows(rows, b, h))], strict=True)
        for (rows, first), (_, other) in pairs:
            if not torch.equal(first, other):
                place = (first != other).nonzero()[0]
                raise ValueError(
                    "mask_mod must be the same for all heads, which share a graph, but heads 0 "
                    f"and {h} differ where q_idx = {int(rows[place[0]])}, kv_idx = {int(place[1])}"
                )

    def samples(self) -> Tensor:
        """Some rows, spread over all of them, the first and the last among them."""
        steps = torch.linspace(0, 1, SAMPLES, dtype=torch.float64)
        rows = (steps.sqrt() * (self.num_targets - 1)).round().long().unique()
        return rows.to(self.device)

    def _evaluated(self, function: MaskMod, rows: int, columns: int) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask

        found = self._called(lambda: create_mask(function, 1, 1, rows, columns, self.device))
        if found.dtype != torch.bool:
            raise ValueError(f"mask_mod must return booleans, got {found.dtype}")
        return found[0, 0]

    def _called(self, call: Callable[[], Tensor]) -> Tensor:
        try:
            with torch.no_grad():
                return call()
        except Exception as error:
            raise ValueError(
                "mask_mod must be a function (b, h, q_idx, kv_idx) of integer tensors without "
                f"dimensions, on device {str(self.device)!r} (device=...) and for q_idx < "
                f"{self.num_targets}, kv_idx < {self.num_sources}; called so, it raised "
                f"{type(error).__name__}: {error}"
            ) from error


class _Readers(TorchFunctionMode):
    """Watches whether operations take one of some tensors; making others like it is no reading."""

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self.watched, self.found = watched, [False] * len(watched)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if not (name.startswith("new_") or name.endswith("_like") or name == "__get__"):
            given = [*tree_leaves(args), *tree_leaves(kwargs or {})]
            for k, tensor in enumerate(self.watched):
                self.found[k] |= any(item is tensor for item in given)
        return func(*args, **(kwargs or {}))


def _takes_a_score(function: Callable[..., Any]) -> bool:
    """Whether it has a fifth argument that must be given, as a score_mod."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) >= 5


def _within_blocks(blocks: BlockMask) -> MaskMod:
    """The mask of a BlockMask: its mask_mod in partial blocks, everything in full ones."""
    height, width = blocks.BLOCK_SIZE
    partial = _dense(blocks.kv_num_blocks, blocks.kv_indices)
    full = torch.zeros_like(partial)
    if blocks.full_kv_num_blocks is not None:
        full = _dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for dim in (0, 1):  # one entry or head stands for all where they are alike
        one = [x.narrow(dim, 0, min(1, x.shape[dim])) for x in (partial, full)]
        if torch.equal(one[0].expand_as(partial), partial) and torch.equal(
            one[1].expand_as(full), full
        ):
            partial, full = one
    own, (B, H) = blocks.mask_mod, partial.shape[:2]

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry = b.new_zeros(()) if B == 1 else b
        head = h.new_zeros(()) if H == 1 else h
        place = entry, head, q_idx // height, kv_idx // width
        return full[place] | (partial[place] & own(b, h, q_idx, kv_idx))

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
    """The graph of one entry: of a shape that was verified, or of all its edges."""
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
    found = []
    for own, values in mask.chunks(b):
        row, source = values.nonzero().T
        found.append(torch.stack([source, own[row]]))
    edge_index = torch.cat(found, dim=1)
    return TokenGraph(edge_index=edge_index, num_targets=N, num_sources=M)


def _guess(mask: _Mask, b: int) -> ListedRows | None:
    """Guess the band of a mask whose rows see a run, or every d-th token, around themselves; None:
    they do not.
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
    # The most hops at which each token sees, to the left and to the right: 0 is counted as seen.
    move = torch.cat([torch.full_like(i, -step), torch.full_like(i, step)])
    target = torch.cat([i, i])
    low, high = torch.zeros_like(move), torch.cat([i // step, (N - 1 - i) // step])
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        inside = mask.at(target, target + move * middle, b)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle - 1)
    first, last = (target + move * low).split(N)
    if loops:  # who does not see itself then is taken to see nothing
        last = torch.where(itself, last, first - 1)
    return ListedRows(first, last, step, loops, M)
