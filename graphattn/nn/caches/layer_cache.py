"""Cache of one layer: the tokens that it has seen, from which it generates the next one."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.arguments import as_int
from graphattn.nn.rotary import RotaryEmbedding, Rotation

FIRST_CAPACITY = 64  # tokens; a cache without a window starts with this room and doubles it
ANGLES_AHEAD = 64  # positions whose rotations are computed together


class LayerCache:
    r"""Cache of the tokens that one layer has seen; made by ``layer.init_cache``.

    The cache stores K = W + d tokens, where W is the window and d is `rollback`: the next token
    sees the last W, and :meth:`truncate` can remove the last d at any time. The tokens are stored
    in order, the oldest first, in buffers with room for

    .. math::
        K + \max(\lfloor K / 4 \rfloor, 16)

    tokens. When a buffer is full, its last K tokens move to the front. Memory is therefore
    constant, the stored tokens are always contiguous, and moving them costs less than attention
    does. A cache without a window doubles its buffers instead. If a kernel runs the steps, the
    buffers are ring buffers of K places: the token at position p is stored at place p modulo K.
    Kernels and torch operations can both use either form. The tensors are outside autograd; a cache
    can be copied and pickled in any mode.

    Args:
        owner: class name and dtype of the layer that made the cache.
        fields: what is stored for each token: a dict from a name to (heads, width).
        batch: the leading dimensions.
        window: how many tokens each token sees, itself included; None for all earlier ones.
        dtype, device: dtype and device of the buffers.
        ring: whether the buffers are ring buffers; without a window they never are.
        rollback: how many of the newest tokens :meth:`truncate` can remove when older ones are
            already gone.

    Attributes:
        batch, window, rollback: as above; :meth:`reorder` can change the first number of `batch`.
        position: number of tokens seen so far, which is also the position of the next token.
        min_length: the smallest length above 0 that :meth:`truncate` accepts; 0 while every token
            is still stored.
        num_bytes: memory of the buffers, in bytes.

    Shapes:
        - **buffers**: one per field, [batch * heads, capacity, width]

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(16, heads=4)
        >>> cache = layer.init_cache(2, window=8)
        >>> for _ in range(100):
        ...     y = layer.step(torch.randn(2, 16), cache)
        >>> cache
        LayerCache(GaussianKernelAttention, batch=[2], window=8, position=100, 3072 bytes)
    """

    shard: Any = None  # this rank's part of a prompt that ranks divide, which the first step reads

    def __init__(
        self,
        owner: tuple[str, torch.dtype],
        fields: dict[str, tuple[int, int]],
        batch: tuple[int, ...],
        window: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ring: bool = False,
        rollback: int = 0,
    ) -> None:
        self.owner, self.fields = owner, fields
        self.batch, self.window, self.device, self.dtype = batch, window, device, dtype
        self.rollback = rollback
        self.is_ring = ring and window is not None
        self.position = self.min_length = 0
        self.most_kept = None if window is None else window + rollback
        self.capacity = FIRST_CAPACITY if self.most_kept is None else self.most_kept
        if self.most_kept is not None and not ring:
            self.capacity += max(self.most_kept // 4, 16)
        self.end = 0  # the newest token is at place end - 1 of every buffer
        self.masked_from = 0  # the first position that the buffer "valid" describes
        self.angles: tuple[int, Tensor, Tensor] | None = None  # first position, cos, sin
        self.call: Any = None  # data that kernels reuse between steps; None makes them again
        entries = math.prod(batch)
        with torch.inference_mode(False):  # an inference tensor could not be written later
            self.buffers = {
                name: torch.zeros(entries * heads, self.capacity, width, dtype=dtype, device=device)
                for name, (heads, width) in fields.items()
            }

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def held(self, most: int | None) -> int:
        """Return the number of tokens seen so far, or `most` if that is smaller."""
        return self.position if most is None else min(self.position, most)

    def runs(self, count: int) -> list[tuple[int, int]]:
        """Locate the newest `count` tokens: (first place, number) of each run, oldest first.

        There is one run, or two where the tokens go past the end of a ring.
        """
        first = self.end - count
        if first >= 0:
            return [(first, count)]
        return [(first + self.capacity, -first), (0, self.end)]

    def rows(self, name: str, count: int) -> Tensor:
        """Return the newest `count` tokens, oldest first, [batch * heads, count, width].

        The result is a view of the buffer, or a copy where the tokens go past the end of a ring.
        """
        parts = [self.buffers[name].narrow(1, *run) for run in self.runs(count)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def tokens(self, name: str, count: int) -> Tensor:
        """Return the newest `count` tokens in the layout of a layer, [*, count, heads, width]."""
        rows = self.rows(name, count)
        heads = self.fields[name][0] if name in self.fields else 1
        return rows.view(*self.batch, heads, count, rows.shape[-1]).transpose(-3, -2)

    def valid(self, count: int) -> Tensor | None:
        """Say which of the newest `count` tokens are real, [*, count]; None if all are."""
        return self.tokens("valid", count)[..., 0, 0] if "valid" in self.buffers else None

    def append(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        """Add n tokens, [*, n, heads, width], and their mask `valid`, [*, n]."""
        self.append_newest(tokens, valid, next(iter(tokens.values())).shape[-3])

    def append_newest(self, tokens: dict[str, Tensor], valid: Tensor | None, num_seen: int) -> None:
        """Add `num_seen` tokens, given the newest of them that the cache stores, or more."""
        num_kept = self.advance(num_seen, masked=valid is not None)
        for name, x in tokens.items():
            n = x.shape[-3]
            if n > 1:
                x = x[..., n - num_kept :, :, :].transpose(-3, -2)
            self._write(name, x, num_kept)
        if "valid" not in self.buffers:
            return
        if valid is None:
            for run in self.runs(num_kept):
                self.buffers["valid"].narrow(1, *run).fill_(True)
        else:
            self._write("valid", valid[..., valid.shape[-1] - num_kept :], num_kept)

    def advance(self, n: int, *, masked: bool) -> int:
        """Reserve places for n new tokens and return how many of them the cache will store.

        If `masked`, some may be padding, so the cache stores from now on which tokens are real.
        """
        if masked and "valid" not in self.buffers:
            entries = math.prod(self.batch)
            with torch.inference_mode(False):
                self.buffers["valid"] = torch.ones(
                    entries, self.capacity, 1, dtype=torch.bool, device=self.device
                )
            self.masked_from = self.position
        self.position += n
        num_kept = n
        if self.most_kept is not None:
            num_kept = min(n, self.most_kept)
            if self.position > self.most_kept:
                self.min_length = max(self.min_length, self.position - self.rollback)
        if self.is_ring:
            self.end = (self.position - 1) % self.capacity + 1
        else:
            self._make_room(num_kept)
            self.end += num_kept
        return num_kept

    def _write(self, name: str, x: Tensor, n: int) -> None:
        """Write the newest n tokens of a buffer, given as [*, heads, n, width]."""
        buffer, runs = self.buffers[name], self.runs(n)
        if len(runs) == 1:
            place = buffer.narrow(1, *runs[0])
            place.copy_(x.reshape(place.shape))
            return
        x = x.reshape(len(buffer), n, buffer.shape[-1])
        for run, part in zip(runs, x.split([length for _, length in runs], dim=1), strict=True):
            buffer.narrow(1, *run).copy_(part)

    def _make_room(self, n: int) -> None:
        """Make room for n more tokens (at most `most_kept`) after the newest one."""
        if self.end + n <= self.capacity:
            return
        if self.most_kept is None:
            more = max(self.capacity, self.end + n - self.capacity)
            self.capacity += more
            with torch.inference_mode(False):
                for name, buffer in self.buffers.items():
                    self.buffers[name] = functional.pad(buffer, (0, 0, 0, more))
            return
        stay = min(self.end, self.most_kept - n)
        for name, buffer in self.buffers.items():
            buffer[:, :stay] = self.rows(name, stay).clone()
        self.end = stay

    def rotation(self, rotary: RotaryEmbedding, n: int, dtype: torch.dtype) -> Rotation:
        """Return the rotation of the next n positions; some positions are computed in advance."""
        first = self.position
        if n > ANGLES_AHEAD:
            return rotary.rotation(torch.arange(first, first + n, device=self.device), dtype)
        start, cos, sin = self.angles or (0, None, None)
        if cos is None or sin is None or not start <= first <= start + len(cos) - n:
            start = first
            ahead = torch.arange(start, start + ANGLES_AHEAD, device=self.device)
            cos, sin = rotary.rotation(ahead, dtype)
            self.angles = start, cos, sin
        here = slice(first - start, first - start + n)
        return cos[here], sin[here]

    def angles_ahead(
        self, rotary: RotaryEmbedding, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int]:
        """Return cosines and sines of some positions, and the index of the next position."""
        if self.angles is None or not 0 <= self.position - self.angles[0] < ANGLES_AHEAD:
            self.rotation(rotary, 1, dtype)
        assert self.angles is not None
        start, cos, sin = self.angles
        return cos, sin, self.position - start

    # Changes to the text during generation.

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never been seen.

        Speculative decoding removes wrong guesses this way. Without a window, or as long as no more
        than W + d tokens have been seen, any length is possible. After that, at least
        :attr:`min_length` tokens must stay: only the d newest can be removed, where d is the
        `rollback` of ``init_cache``. Length 0 empties the cache at any time. All texts of the batch
        get the same length. If they accept different numbers of guesses, truncate to the smallest
        and run the other tokens again.

        Args:
            length: how many tokens stay, at most :attr:`position`.

        Raises:
            ValueError: if the length is out of this range; the cache does not change.

        Example:
            >>> import torch, graphattn as ga
            >>> layer, x = ga.nn.KrauseAttention(16, heads=4), torch.randn(2, 100, 16)
            >>> cache = layer.init_cache(2, window=8, rollback=3)
            >>> y = layer.step(x, cache)
            >>> cache.truncate(97)
            >>> torch.allclose(layer.step(x[:, 97], cache), y[:, 97], atol=1e-6)
            True
        """
        length = as_int("length", length, 0)
        if length > self.position:
            raise ValueError(
                f"length must be at most {self.position}, the number of tokens seen so far, got "
                f"{length}"
            )
        if 0 < length < self.min_length:
            raise ValueError(
                f"length must be {self.min_length} to {self.position} (or 0 for an empty cache), "
                f"got {length}: with window = {self.window} and rollback = {self.rollback}, the "
                "cache no longer stores what earlier tokens saw. Make it with init_cache(..., "
                "rollback=d) to be able to remove d tokens at any time"
            )
        if length == 0:
            self.end = self.min_length = 0
        elif self.is_ring:
            self.end = (length - 1) % self.capacity + 1
        else:
            self.end -= self.position - length
        self.position = length
        if "valid" in self.buffers and length <= self.masked_from:
            del self.buffers["valid"]  # all tokens that are left are real

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension (beam search).

        Entries may repeat or be left out, and their number may change.

        Raises:
            ValueError: if the cache has no batch dimension, or `index` is not an int64 tensor
                [entries] of numbers in 0 .. batch[0] - 1.
        """
        if not self.batch:
            raise ValueError(
                "index cannot reorder a cache without batch dimensions: reorder needs a cache "
                "made by init_cache with batch >= 1, got batch=[]"
            )
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype != torch.int64:
            got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise ValueError(f"index must be an int64 tensor [entries], got {got}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.batch[0]:
            raise ValueError(f"index must be within 0 .. {self.batch[0] - 1}, got {index.tolist()}")
        index = index.to(self.device)
        with torch.inference_mode(False), torch.no_grad():
            for name, buffer in self.buffers.items():
                inner = len(buffer) // max(1, self.batch[0])
                entries = buffer.unflatten(0, (self.batch[0], inner)).index_select(0, index)
                self.buffers[name] = entries.flatten(0, 1)
        self.batch = (len(index), *self.batch[1:])

    def clone(self) -> Self:
        """Copy the cache, so that one text can continue in two ways. The two share no memory."""
        twin = copy.copy(self)
        twin.call = None
        with torch.inference_mode(False), torch.no_grad():
            twin.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = self.clone()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "call": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with torch.inference_mode(False):  # inference tensors could not be written later
            self.buffers = {
                name: buffer.clone() if buffer.is_inference() else buffer
                for name, buffer in self.buffers.items()
            }

    def __repr__(self) -> str:
        back = f"rollback={self.rollback}, " if self.rollback else ""
        facts = f"batch={list(self.batch)}, window={self.window}, {back}position={self.position}"
        return f"{type(self).__name__}({self.owner[0]}, {facts}, {self.num_bytes} bytes)"
