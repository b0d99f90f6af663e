"""Graphs of the last `window` tokens, limited by a model's own attention mask.

The attention implementations of transformers pass different kinds of masks to layers: none,
booleans, numbers that are added to scores, blocks of FlexAttention. The shortcut sees what the mask
allows, except later tokens and tokens more than `window` back.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from graphattn.graphs.builders.combine import batch as batch_of
from graphattn.graphs.builders.windows import causal_window_graph
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.transformers.masks import mask_function as masks
from graphattn.integrations.transformers.masks.once import once


class Reach(NamedTuple):
    """Slots of the cache that the queries see, among the slots of a :class:`ShortcutCall`.

    If `packed`, the graph contains all texts of a batch one after the other, and `valid` is a pair
    [B * N], [B * M].
    """

    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None] | None
    packed: bool = False


class ShortcutCall(NamedTuple):
    """Sizes of one call: B texts with Q queries each; the first query is in slot `past` of K."""

    batch: int
    queries: int
    slots: int
    past: int
    window: int

    @property
    def start(self) -> int:
        """Return the first slot that a query sees."""
        return max(self.past - self.window + 1, 0)

    @property
    def stop(self) -> int:
        """Return the slot of the last query, plus one."""
        return self.past + self.queries


def reach_of(mask: Any, call: ShortcutCall) -> Reach:
    """Return the graph of one call for any kind of mask.

    Args:
        mask: None, if every query sees all slots up to its own; a bool tensor [B or 1, 1, Q, K],
            True where a query sees a slot; a floating-point tensor that is added to scores (0: is
            seen; -inf or the dtype's minimum: is not seen); a `BlockMask`; or a sketch of
            graphattn's own mask function.
        call: the sizes.

    Raises:
        ValueError: if the mask has another shape or dtype, differs between heads, or adds other
            numbers.
    """
    if mask is None:
        return _plain(call, None)
    if is_sketch(mask):
        return _of_sketch(mask, call)
    if call.queries == 1:  # the row of the mask, without reading its values
        return _plain(call, dense(mask, call)[:, 0, call.start : call.stop])
    return _read(mask, call)


# A mask whose values are read cannot be traced.
@torch.compiler.disable
def _read(mask: Any, call: ShortcutCall) -> Reach:
    """Return the graph of a mask by its values, computed once for all layers."""
    if isinstance(mask, Tensor):
        return once(mask, ("shortcut", call), lambda: _recognized(dense(mask, call), call))
    with _LOCK:
        known: dict[ShortcutCall, Reach] = _KNOWN_BLOCKS.setdefault(mask, {})
    if call not in known:
        known[call] = _recognized(dense(mask, call), call)
    return known[call]


# A BlockMask of FlexAttention is not a tensor, so it has its own cache, while it is in memory.
_LOCK = threading.Lock()
_KNOWN_BLOCKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_sketch(mask: Any) -> bool:
    """Return whether a mask is a sketch of graphattn's own mask function."""
    return isinstance(mask, Tensor) and masks.is_sketch(mask)


def _of_sketch(sketch: Tensor, call: ShortcutCall) -> Reach:
    """Return the graph of a sketch without reading its values. It ends with the last query's
    slot."""
    band, valid, slots = masks.read_sketch(sketch)
    if slots != call.stop:
        raise ValueError(
            f"attention_mask must have {call.stop} slots, up to that of the last query, got {slots}"
        )
    if valid is not None:
        valid = valid.expand(call.batch, slots)[:, call.start :]
    return _plain(call, valid, min(call.window, band.before + 1))


def dense(mask: Any, call: ShortcutCall) -> Tensor:
    """Convert a mask (not None) to booleans [B, Q, K], True where a query sees a slot.

    A static cache has slots after that of the last query. If the mask does not contain them, the
    result has fewer than K slots.
    """
    B, Q, K = call.batch, call.queries, call.slots
    if not isinstance(mask, Tensor):
        mask = _dense_blocks(mask, B, Q, K)
    mask = masks.without_empty_places(mask, Q)
    sizes = mask.shape if mask.dim() == 4 else (0, 0, 0, 0)
    if sizes[0] not in (1, B) or sizes[2] != Q or sizes[3] < call.stop:
        raise ValueError(
            f"attention_mask must have shape [{B}, 1, {Q}, {K}] (texts, heads, queries, slots of "
            f"the cache) in a layer with a Krause shortcut, got {list(mask.shape)}"
        )
    if mask.shape[1] != 1:
        raise ValueError(
            "attention_mask must be the same for all heads, [B, 1, Q, K], in a layer with a "
            f"Krause shortcut, got {list(mask.shape)}"
        )
    mask = mask[:, 0, :, :K]
    if mask.dtype != torch.bool:
        mask = _from_scores(mask)
    return mask.expand(B, Q, -1)


def _from_scores(mask: Tensor) -> Tensor:
    """Return where a mask adds 0 to scores; other values must hide the pair."""
    if not mask.is_floating_point():
        raise ValueError(
            "attention_mask must be bool, or floating-point if it is added to scores, got "
            f"{mask.dtype}"
        )
    keep = mask == 0
    if not torch.compiler.is_compiling():
        forbids = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((keep | forbids).all()):
            odd = mask[~(keep | forbids)][0].item()
            raise ValueError(
                "attention_mask must add only 0 (seen) or the dtype's minimum or -inf (not seen) "
                f"in a layer with a Krause shortcut, which has no scores for a bias, got {odd}"
            )
    return keep


def _dense_blocks(mask: Any, B: int, Q: int, K: int) -> Tensor:
    """Evaluate a `BlockMask` at all pairs: [B, 1, Q, K]."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(mask, BlockMask):
        raise ValueError(
            "attention_mask must be None, a tensor or a BlockMask in a layer with a Krause "
            f"shortcut, got {type(mask).__name__}"
        )
    place = mask.kv_indices.device
    # Use its mask_mod, not its blocks: transformers makes both from one function.
    return create_mask(mask.mask_mod, B, 1, Q, K, device=place)


def _plain(call: ShortcutCall, valid: Tensor | None, window: int | None = None) -> Reach:
    graph = causal_window_graph(
        call.queries, call.window if window is None else window, past=call.past - call.start
    )
    return Reach(graph, None if valid is None else (None, valid))


def _recognized(keep: Tensor, call: ShortcutCall) -> Reach:
    """Find a window with padding, windows of packed texts, or a list of edges."""
    B, Q, W = call.batch, call.queries, call.window
    before = call.past - call.start
    # sub[b, q, c]: whether q sees the slot c - (W - 1) places after that of query 0.
    sub = functional.pad(keep[..., call.start : call.stop], (W - 1 - before, 0))
    query = torch.arange(Q, device=keep.device)[:, None]
    place = query + torch.arange(W, device=keep.device)
    band = sub.gather(2, place.expand(B, Q, W))  # the last of the W slots is the query's own
    used = band.any(dim=(0, 1)).nonzero()
    if len(used) == 0:  # no query sees a slot
        return _plain(call, keep.new_zeros(B, call.stop - call.start))
    first = int(used[0])  # the model's own window may be smaller
    valid = sub.any(dim=1)  # [B, W - 1 + Q]
    if torch.equal(band[..., first:], valid[:, place[:, first:]]):
        seen = valid[:, W - 1 - before :]
        return _plain(call, None if bool(seen.all()) else seen, W - first)
    packed = _side_by_side(band, call) if before == 0 else None
    return _listed(band, call) if packed is None else packed


def _side_by_side(band: Tensor, call: ShortcutCall) -> Reach | None:
    """Recognise packed texts, each with a window, and tokens that are not seen."""
    B, Q, W = call.batch, call.queries, call.window
    if W < 2:
        return None
    valid = band[..., -1]  # a token that does not see itself is padding
    starts = ~band[..., -2]
    starts[:, 0] = True
    text = starts.long().cumsum(1)
    place = torch.arange(Q, device=band.device)[:, None] + torch.arange(
        1 - W, 1, device=band.device
    )
    source = place.clamp(min=0)
    expected = (text[:, source] == text[:, :, None]) & (place >= 0)
    expected = expected & valid[:, source]
    if not torch.equal(band, expected):
        return None
    first = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(first, append=first.new_tensor([B * Q])).tolist()
    graph = batch_of([causal_window_graph(n, W) for n in lengths]).to(band.device)
    return Reach(graph, None if bool(valid.all()) else (None, valid.flatten()), packed=True)


def _listed(band: Tensor, call: ShortcutCall) -> Reach:
    """Convert any other mask to a list of edges."""
    B, Q, W = call.batch, call.queries, call.window
    M = call.stop - call.start
    text, query, place = band.nonzero().T
    source = query + place - (W - 1) + (call.past - call.start)
    edges = torch.stack([text * M + source, text * Q + query])
    graph = from_edge_index(edges, num_targets=B * Q, num_sources=B * M)
    return Reach(graph, None, packed=True)
