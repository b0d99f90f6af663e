"""Cache of linear attention without a window: sums over the tokens, not the tokens themselves."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.ops.inputs import clear_invalid, compute_dtype


class RunningCache(LayerCache):
    r"""Cache of linear attention over a text without a window: sums, in constant memory.

    ``LinearAttention.init_cache(batch, window=None)`` makes one. Every head stores the sums

    .. math::
        S = \sum_j \tilde k_j v_j^\top \in \mathbb{R}^{D \times D_v}, \qquad
        z = \sum_j k_j \in \mathbb{R}^D

    (Transformers are RNNs, Eq. 18-19), in float32 or float64. Compensated summation (Kahan, 1965)
    stores the rounding error of each sum and corrects it with the next token, so that errors do not
    accumulate in long texts, not even in repetitive ones. A token cannot be removed from a sum.
    Therefore the newest d tokens, where d is `rollback`, are stored outside the sums, so that
    :meth:`truncate` can remove them. They are added to the sums when they are older than that. A
    token that contains NaN stays in the sums until the cache is emptied.

    Args:
        owner, fields, batch, dtype, device, rollback: as in :class:`LayerCache`; the fields are
            "key", "value" and, with a rotary embedding, "turned_key".

    Attributes:
        batch, position, min_length, num_bytes, rollback: as in :class:`LayerCache`.
        window: None.
        sums: "state" [batch * heads, D, Dv] and "total" [batch * heads, D], over the first
            `min_length` tokens; "state_rest" and "total_rest", the rounding errors of these sums.

    Shapes:
        - **buffers**: one per field, [batch * heads, rollback, width], of the newest tokens

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
        shapes = {"state": of_state, "total": of_state[:2]}
        shapes |= {f"{name}_rest": shape for name, shape in shapes.items()}
        with torch.inference_mode(False):  # an inference tensor could not be written later
            self.sums = {
                name: torch.zeros(shape, dtype=compute_dtype(dtype), device=device)
                for name, shape in shapes.items()
            }

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(x.nbytes for x in self.sums.values())

    def held(self, most: int | None) -> int:
        """Return the number of tokens outside the sums, or `most` if that is smaller."""
        count = self.position - self.min_length
        return count if most is None else min(count, most)

    def append(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        """Add n tokens, [*, n, heads, width], and their mask `valid`, [*, n]."""
        tokens = {name: clear_invalid(x, valid) for name, x in tokens.items()}
        n = tokens["key"].shape[-3]
        held = self.held(None)
        num_added = max(0, held + n - self.rollback)
        num_new = num_added - min(num_added, held)
        if num_added > num_new:
            older = {name: self.tokens(name, held) for name in self.fields}
            self.add({name: x[..., : num_added - num_new, :, :] for name, x in older.items()})
        if num_new:
            self.add({name: x[..., :num_new, :, :] for name, x in tokens.items()})
        if self.rollback:
            super().append(tokens, None)
        else:
            self.advance(n, masked=False)

    def add(self, tokens: dict[str, Tensor]) -> None:
        """Add the tokens [*, n, heads, width] to the sums."""
        state = self.sums["state"]
        rows = {
            name: x.transpose(-3, -2).to(state.dtype).reshape(len(state), -1, x.shape[-1])
            for name, x in tokens.items()
        }
        turned = rows.get("turned_key", rows["key"])
        # A rest is the rounding error so far: subtract it from the new terms, then store the new
        # error.
        self.sums["state_rest"].baddbmm_(turned.transpose(1, 2), rows["value"], beta=-1)
        self.sums["total_rest"].neg_().add_(rows["key"].sum(1))
        for name in ("state", "total"):
            total, more = self.sums[name], self.sums[f"{name}_rest"]
            after = total + more
            torch.sub(torch.sub(after, total, out=total), more, out=more)
            total.copy_(after)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never been seen.

        The newest `rollback` tokens can be removed, or all of them (length 0). A token that is
        already in the sums cannot be removed alone.

        Args:
            length: how many tokens stay, :attr:`min_length` to :attr:`position`, or 0.

        Raises:
            ValueError: if the length is out of this range; the cache does not change.
        """
        super().truncate(length)
        if length == 0:
            for x in self.sums.values():
                x.zero_()

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension (beam search).

        Raises:
            ValueError: if the cache has no batch dimension, or `index` is not an int64 tensor
                [entries] of numbers in 0 .. batch[0] - 1.
        """
        before = self.batch
        super().reorder(index)
        with torch.inference_mode(False), torch.no_grad():
            for name, x in self.sums.items():
                entries = x.unflatten(0, (before[0], len(x) // max(1, before[0])))
                self.sums[name] = entries.index_select(0, index.to(self.device)).flatten(0, 1)

    def clone(self) -> Self:
        """Copy the cache, so that one text can continue in two ways. The two share no memory."""
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
