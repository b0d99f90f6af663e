"""Graphs of the last `window` tokens within a model's own attention mask.

Every attention implementation of transformers hands another kind of mask to its layers: none,
booleans, numbers that are added to scores, blocks of FlexAttention. The shortcut sees exactly what
the mask lets see, never ahead of itself, and never more than `window` tokens back.
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
    """Slots of the cache that the queries look at.

    `graph` and `valid` speak of the slots `start` .. `stop` - 1. Where `packed`, the texts of a
    batch stand side by side in the graph, and `valid` is a pair [B * N], [B * M].
    """

    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None] | None
    start: int
    stop: int
    packed: bool = False


class ShortcutCall(NamedTuple):
    """Sizes of one call: B texts, Q queries of each, the first in slot `past` of K."""

    batch: int
    queries: int
    slots: int
    past: int
    window: int

    @property
    def start(self) -> int:
        """The first slot that a query reaches."""
        return max(self.past - self.window + 1, 0)

    @property
    def stop(self) -> int:
        """One more than the slot of the last query."""
        return self.past + self.queries


def reach(mask: Any, call: ShortcutCall) -> Reach:
    """The graph of one call, whatever mask the layer was handed.

    Args:
        mask: None, where every query sees all slots up to its own; a bool tensor [B or 1, 1, Q, K],
            True where a query sees a slot; a floating-point one that is added to scores, 0 where a
            query sees a slot and -inf or the dtype's minimum where not; a `BlockMask`; or a sketch
            of graphattn's own mask function.
        call: the sizes.

    Raises:
        ValueError: if the mask has another shape or dtype, differs between heads, or adds something
            else to scores.
    """
    if mask is None:
        return _plain(call, None)
    if is_sketch(mask):
        return _of_sketch(mask, call)
    if isinstance(mask, Tensor):
        return once(mask, ("shortcut", call), lambda: _recognized(dense(mask, call), call))
    return _of_blocks(mask, call)


def is_sketch(mask: Any) -> bool:
    """Whether a mask is one that graphattn's own mask function did not write out."""
    return isinstance(mask, Tensor) and masks.is_sketch(mask)


def _of_sketch(sketch: Tensor, call: ShortcutCall) -> Reach:
    """A sketch says what it is: nothing is looked at. It ends with the last query's slot."""
    band, valid, slots = masks.read_sketch(sketch)
    if slots != call.stop:
        raise ValueError(
            f"attention_mask must speak of {call.stop} slots, up to the last query's, got {slots}"
        )
    if valid is not None:
        valid = valid.expand(call.batch, slots)[:, call.start :]
    return _plain(call, valid, min(call.window, band.before + 1))


def dense(mask: Any, call: ShortcutCall) -> Tensor:
    """Any mask but None as booleans [B, Q, K], True where a query sees a slot.

    Of slots beyond the last query's, as a static cache has them, a mask may be silent: then there
    are fewer than K.
    """
    B, Q, K = call.batch, call.queries, call.slots
    if not isinstance(mask, Tensor):
        mask = _dense_blocks(mask, B, Q, K)
    sizes = mask.shape if mask.dim() == 4 else (0, 0, 0, 0)
    if sizes[0] not in (1, B) or sizes[2] != Q or sizes[3] < call.stop:
        raise ValueError(
            f"attention_mask must have shape [{B}, 1, {Q}, {K}] (texts, heads, queries, slots of "
            f"the cache) where a layer has a Krause shortcut, got {list(mask.shape)}"
        )
    if mask.shape[1] != 1:
        raise ValueError(
            "attention_mask must be the same for all heads, [B, 1, Q, K], where a layer has a "
            f"Krause shortcut, got {list(mask.shape)}"
        )
    mask = mask[:, 0, :, :K]
    if mask.dtype != torch.bool:
        mask = _from_scores(mask)
    return mask.expand(B, Q, -1)


def _from_scores(mask: Tensor) -> Tensor:
    """Mark the places where a mask adds nothing to scores; elsewhere it must forbid."""
    if not mask.is_floating_point():
        raise ValueError(
            "attention_mask must be bool, or floating-point where it is added to scores, got "
            f"{mask.dtype}"
        )
    keep = mask == 0
    if not torch.compiler.is_compiling():
        forbids = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((keep | forbids).all()):
            odd = mask[~(keep | forbids)][0].item()
            raise ValueError(
                "attention_mask must add 0 (seen) or the dtype's minimum or -inf (not seen) to "
                f"scores where a layer has a Krause shortcut, which has no such scores; got {odd}"
            )
    return keep


def _dense_blocks(mask: Any, B: int, Q: int, K: int) -> Tensor:
    """A `BlockMask` at all pairs: [B, 1, Q, K]."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(mask, BlockMask):
        raise ValueError(
            "attention_mask must be None, a tensor or a BlockMask where a layer has a Krause "
            f"shortcut, got {type(mask).__name__}"
        )
    place = mask.kv_indices.device
    # Its own mask_mod, not its blocks: transformers makes both from one function.
    return create_mask(mask.mask_mod, B, 1, Q, K, device=place)


# The blocks of FlexAttention are no tensor: known for as long as they are there.
_LOCK = threading.Lock()
_KNOWN_BLOCKS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _of_blocks(mask: Any, call: ShortcutCall) -> Reach:
    """The graph of a `BlockMask`, once for all layers."""
    with _LOCK:
        known: dict[ShortcutCall, Reach] = _KNOWN_BLOCKS.setdefault(mask, {})
    found = known.get(call)
    if found is None:
        found = known[call] = _recognized(dense(mask, call), call)
    return found


def _plain(call: ShortcutCall, valid: Tensor | None, window: int | None = None) -> Reach:
    graph = causal_window_graph(
        call.queries, call.window if window is None else window, past=call.past - call.start
    )
    pair = None if valid is None else (None, valid)
    return Reach(graph, pair, call.start, call.stop)


def _recognized(keep: Tensor, call: ShortcutCall) -> Reach:
    """A window and padding, windows of texts side by side, or a list of edges."""
    B, Q, W = call.batch, call.queries, call.window
    before = call.past - call.start
    # sub[b, q, c]: whether q sees the slot c - (W - 1) places after that of query 0.
    sub = functional.pad(keep[..., call.start : call.stop], (W - 1 - before, 0))
    own = torch.arange(Q, device=keep.device)[:, None]
    place = own + torch.arange(W, device=keep.device)
    band = sub.gather(2, place.expand(B, Q, W))  # the last of W is the query's own slot
    used = band.any(dim=(0, 1)).nonzero()
    if len(used) == 0:  # nobody sees anything
        return _plain(call, keep.new_zeros(B, call.stop - call.start))
    first = int(used[0])  # a window of the model's own may be narrower
    valid = sub.any(dim=1)  # [B, W - 1 + Q]
    if torch.equal(band[..., first:], valid[:, place[:, first:]]):
        seen = valid[:, W - 1 - before :]
        return _plain(call, None if bool(seen.all()) else seen, W - first)
    found = _side_by_side(band, call) if before == 0 else None
    return _listed(band, call) if found is None else found


def _side_by_side(band: Tensor, call: ShortcutCall) -> Reach | None:
    """Texts packed behind each other: a window in each, and tokens that nobody sees."""
    B, Q, W = call.batch, call.queries, call.window
    if W < 2:
        return None
    valid = band[..., -1]  # a token sees itself, or is padding
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
    pair = None if bool(valid.all()) else (None, valid.flatten())
    return Reach(graph, pair, call.start, call.stop, packed=True)


def _listed(band: Tensor, call: ShortcutCall) -> Reach:
    """Any other mask, edge by edge."""
    B, Q, W = call.batch, call.queries, call.window
    M = call.stop - call.start
    text, query, place = band.nonzero().T
    source = query + place - (W - 1) + (call.past - call.start)
    edges = torch.stack([text * M + source, text * Q + query])
    graph = from_edge_index(edges, num_targets=B * Q, num_sources=B * M)
    return Reach(graph, None, call.start, call.stop, packed=True)
