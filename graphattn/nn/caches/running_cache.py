"""Cache of linear attention: sums over the tokens it has seen, and none of these tokens."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.ops.inputs import clear_invalid, compute_dtype


class RunningCache(LayerCache):
    r"""Cache of linear attention over a text without a window: sums, in constant memory.

    Made by ``LinearAttention.init_cache(batch, window=None)``. Every head keeps the sums

    .. math::
        S = \sum_j \tilde k_j v_j^\top \in \mathbb{R}^{D \times D_v}, \qquad
        z = \sum_j k_j \in \mathbb{R}^D

    (Transformers are RNNs, Eq. 18-19), in float32 or better, however long the text: what rounding
    adds to a sum is kept beside it and taken off with the next token (Kahan, 1965), so that errors
    do not add up, not even in a text that repeats itself. A sum forgets nothing, so the newest d
    tokens that :meth:`truncate` may take back, d being the `rollback`, stand beside it as they are,
    and join it when they cannot be taken back any more. A token that is not a number stays in the
    sums until the cache is emptied.

    Args:
        owner, fields, batch, dtype, device, rollback: as in :class:`LayerCache`; the fields are
            "key", "value" and, where positions turn them, "turned_key".

    Attributes:
        batch, position, min_length, num_bytes, rollback: as in :class:`LayerCache`.
        window: None.
        sums: "state" [batch * heads, D, Dv] and "total" [batch * heads, D], of the first
            `min_length` tokens; "state_rest" and "total_rest", what rounding has added to them.

    Shapes:
        - **buffers**: a field each, [batch * heads, rollback, width], of the newest tokens

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.LinearAttention(16, heads=4)
        >>> cache = layer.init_cache(2, window=None, rollback=3)
        >>> y = layer.step(torch.randn(2, 100, 16), cache)
        >>> cache.truncate(97)
        >>> cache.position, cache.sums["state"].shape
        (97, torch.Size([8, 4, 4]))
    """

    def __init__(
        self,
        owner: tuple[str, torch.dtype],
        fields: dict[str, tuple[int, int]],
        batch: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        rollback: int = 0,
    ) -> None:
        super().__init__(owner, fields, batch, 0, dtype=dtype, device=device, rollback=rollback)
        self.window = None
        if rollback == 0:
            self.buffers = {}
        entries, (heads, features) = math.prod(batch), fields["key"]
        of_state = entries * heads, features, fields["value"][1]
        of_total = entries * heads, features
        shapes = {
            "state": of_state,
            "total": of_total,
            "state_rest": of_state,
            "total_rest": of_total,
        }
        with torch.inference_mode(False):  # a tensor made there could never be written outside
            self.sums = {
                name: torch.zeros(shape, dtype=compute_dtype(dtype), device=device)
                for name, shape in shapes.items()
            }

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(x.nbytes for x in self.sums.values())

    def held(self, most: int | None) -> int:
        """How many tokens stand beside the sums, at most `most`."""
        count = self.position - self.min_length
        return count if most is None else min(count, most)

    def append(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        """Take in n tokens, [*, n, heads, width], and `valid`, [*, n]."""
        tokens = {name: clear_invalid(x, valid) for name, x in tokens.items()}
        n = tokens["key"].shape[-3]
        held = self.held(None)
        leaving = max(0, held + n - self.rollback)
        old = min(leaving, held)
        if old:
            self._add({name: self.tokens(name, held)[..., :old, :, :] for name in self.fields})
        if leaving > old:
            self._add({name: x[..., : leaving - old, :, :] for name, x in tokens.items()})
        if self.rollback:
            super().append(tokens, None)
        else:
            self.advance(n, masked=False)

    def _add(self, tokens: dict[str, Tensor]) -> None:
        """Tokens [*, n, heads, width] join the sums."""
        state = self.sums["state"]
        rows = {
            name: x.transpose(-3, -2).to(state.dtype).reshape(len(state), -1, x.shape[-1])
            for name, x in tokens.items()
        }
        turned = rows.get("turned_key", rows["key"])
        # The rests are what rounding added before: tokens join without them, and leave new ones.
        self.sums["state_rest"].baddbmm_(turned.transpose(1, 2), rows["value"], beta=-1)
        self.sums["total_rest"].neg_().add_(rows["key"].sum(1))
        for name in ("state", "total"):
            total, more = self.sums[name], self.sums[f"{name}_rest"]
            after = total + more
            torch.sub(torch.sub(after, total, out=total), more, out=more)
            total.copy_(after)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never been seen.

        The `rollback` newest can go, and all (length 0); what has joined the sums cannot be taken
        out of them again.

        Args:
            length: how many tokens stay, :attr:`min_length` to :attr:`position`, or 0.

        Raises:
            ValueError: for a length out of this range; the cache stays as it is.
        """
        super().truncate(length)
        if length == 0:
            for x in self.sums.values():
                x.zero_()

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension (beam search).

        Raises:
            ValueError: unless the cache has a batch dimension and `index` lists entries of it.
        """
        before = self.batch
        super().reorder(index)
        with torch.inference_mode(False), torch.no_grad():
            for name, x in self.sums.items():
                entries = x.unflatten(0, (before[0], len(x) // max(1, before[0])))
                self.sums[name] = entries.index_select(0, index.to(self.device)).flatten(0, 1)

    def clone(self) -> Self:
        """A copy that shares no memory with this cache: the text branches in two."""
        twin = super().clone()
        with torch.inference_mode(False), torch.no_grad():
            twin.sums = {name: x.clone() for name, x in self.sums.items()}
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with torch.inference_mode(False):
            self.sums = {
                name: x.clone() if x.is_inference() else x for name, x in self.sums.items()
            }
