"""Cache of one layer: the tokens it has seen, to generate the next one."""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.arguments import as_int
from graphattn.nn.rotary import RotaryEmbedding, Rotation

FIRST_CAPACITY = 64  # tokens that a cache without a window has room for at first; it doubles
ANGLES_AHEAD = 64  # positions whose rotations are computed at a time


class LayerCache:
    r"""Cache of the tokens that one layer has seen; made by ``layer.init_cache``.

    It keeps K = W + d tokens, W being the window and d the `rollback`: the next token sees the last
    W, and :meth:`truncate` may take back d at any time. The newest stand side by side, oldest
    first, in buffers with room for

    .. math::
        K + \max(\lfloor K / 4 \rfloor, 16)

    tokens. When those are full, the last K move to their front. So memory is constant, nothing is
    read around a corner, and moving costs less than attending. A cache without a window doubles
    its buffers instead. Where a kernel takes the steps, which reads around corners, the buffers are
    rings of K places: the token of position p stands at place p modulo K. Either form serves either
    way. It holds plain tensors outside autograd, and may be copied and pickled in any mode.

    Args:
        owner: name and dtype of the layer that made it.
        fields: what is kept of a token, name -> (heads, width).
        batch: the leading dimensions.
        window: how many tokens a token sees, itself included; None for all.
        dtype, device: of the buffers.
        ring: whether they are rings; only with a window.
        rollback: how many tokens can be taken back when more have been seen than are kept.

    Attributes:
        batch, window, rollback: as above; :meth:`reorder` may change the first of `batch`.
        position: tokens seen so far, which is the position of the next one.
        min_length: the least length above 0 that :meth:`truncate` takes; 0 while all is kept.
        num_bytes: memory held.

    Shapes:
        - **buffers**: a field each, [batch * heads, room, width]

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(16, heads=4)
        >>> cache = layer.init_cache(2, window=8)
        >>> for _ in range(100):
        ...     y = layer.step(torch.randn(2, 16), cache)
        >>> cache
        LayerCache(GaussianKernelAttention, batch=[2], window=8, position=100, 3072 bytes)
    """

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
        self.end = 0  # the newest token stands at end - 1 of every buffer
        self.masked_from = 0  # the position from which on the buffer "valid" was needed
        self.angles: tuple[int, Tensor, Tensor] | None = None  # first position, cos, sin
        self.call: Any = None  # what a kernel's call needs to know of the buffers; made anew freely
        entries = math.prod(batch)
        with torch.inference_mode(False):  # a tensor made there could never be written outside
            self.buffers = {
                name: torch.zeros(entries * heads, self.capacity, width, dtype=dtype, device=device)
                for name, (heads, width) in fields.items()
            }

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def held(self, most: int | None) -> int:
        """How many tokens there are, at most `most`."""
        return self.position if most is None else min(self.position, most)

    def runs(self, count: int) -> list[tuple[int, int]]:
        """(first place, how many) of the newest `count` tokens, oldest first.

        One run, or around the end of a ring two.
        """
        first = self.end - count
        if first >= 0:
            return [(first, count)]
        return [(first + self.capacity, -first), (0, self.end)]

    def rows(self, name: str, count: int) -> Tensor:
        """The newest `count` tokens, oldest first, [batch * heads, count, width].

        A view, but around the end of a ring a copy.
        """
        found = [self.buffers[name].narrow(1, *run) for run in self.runs(count)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def tokens(self, name: str, count: int) -> Tensor:
        """Return the newest tokens as a layer has them, [*, count, heads, width]."""
        rows = self.rows(name, count)
        heads = self.fields[name][0] if name in self.fields else 1
        return rows.view(*self.batch, heads, count, rows.shape[-1]).transpose(-3, -2)

    def valid(self, count: int) -> Tensor | None:
        """Mark the newest `count` tokens that are real, [*, count]; None where all are."""
        return self.tokens("valid", count)[..., 0, 0] if "valid" in self.buffers else None

    def append(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        """Take in n tokens, [*, n, heads, width], and `valid`, [*, n]."""
        n = next(iter(tokens.values())).shape[-3]
        kept = self.advance(n, masked=valid is not None)
        for name, x in tokens.items():
            if n > 1:
                x = x[..., n - kept :, :, :].transpose(-3, -2)
            self._write(name, x, kept)
        if "valid" not in self.buffers:
            return
        if valid is None:
            for run in self.runs(kept):
                self.buffers["valid"].narrow(1, *run).fill_(True)
        else:
            self._write("valid", valid[..., n - kept :], kept)

    def advance(self, n: int, *, masked: bool) -> int:
        """Make n more tokens the newest, still to be written; returns how many of them are kept.

        `masked`: some may not be real, so that the cache tells from now on which are.
        """
        if masked and "valid" not in self.buffers:
            entries = math.prod(self.batch)
            with torch.inference_mode(False):
                self.buffers["valid"] = torch.ones(
                    entries, self.capacity, 1, dtype=torch.bool, device=self.device
                )
            self.masked_from = self.position
        self.position += n
        kept = n
        if self.most_kept is not None:
            kept = min(n, self.most_kept)
            if self.position > self.most_kept:
                self.min_length = max(self.min_length, self.position - self.rollback)
        if self.is_ring:
            self.end = (self.position - 1) % self.capacity + 1
        else:
            self._make_room(kept)
            self.end += kept
        return kept

    def _write(self, name: str, x: Tensor, n: int) -> None:
        """The newest n tokens of a buffer, from [*, heads, n, width]."""
        buffer, runs = self.buffers[name], self.runs(n)
        if len(runs) == 1:
            place = buffer.narrow(1, *runs[0])
            place.copy_(x.reshape(place.shape))
            return
        x = x.reshape(len(buffer), n, buffer.shape[-1])
        for run, part in zip(runs, x.split([length for _, length in runs], dim=1), strict=True):
            buffer.narrow(1, *run).copy_(part)

    def _make_room(self, n: int) -> None:
        """Room for n more tokens (at most as many as are kept) behind the newest."""
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
        """Return the rotation of the next n positions, computed a few positions ahead."""
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
        """Cosines and sines of a few positions, and which of these is the next one's."""
        if self.angles is None or not 0 <= self.position - self.angles[0] < ANGLES_AHEAD:
            self.rotation(rotary, 1, dtype)
        assert self.angles is not None
        start, cos, sin = self.angles
        return cos, sin, self.position - start

    # What a generation does with it.

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as if they had never been seen.

        So a guess is taken back (speculative decoding). All is possible while no more tokens have
        been seen than are kept, W + d of them, and without a window. Later at least
        :attr:`min_length` must stay: the d newest can go, the `rollback` of ``init_cache``.
        Length 0 empties the cache at any time. All texts of the batch go back to one length: where
        they accept different numbers of guesses, go to the least and step again.

        Args:
            length: how many tokens stay, at most :attr:`position`.

        Raises:
            ValueError: for a length out of this range; the cache stays as it is.

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
                f"length must be at most {self.position}, the tokens seen so far, got {length}"
            )
        if 0 < length < self.min_length:
            raise ValueError(
                f"length must be {self.min_length} to {self.position} (or 0 for an empty cache), "
                f"got {length}: with window = {self.window} and rollback = {self.rollback}, what "
                "earlier tokens saw is gone. init_cache(..., rollback=d) keeps what it takes to "
                "go d tokens back"
            )
        if length == 0:
            self.end = self.min_length = 0
        elif self.is_ring:
            self.end = (length - 1) % self.capacity + 1
        else:
            self.end -= self.position - length
        self.position = length
        if "valid" in self.buffers and length <= self.masked_from:
            del self.buffers["valid"]  # padding was among what is forgotten: steps are as before it

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension (beam search).

        Entries may repeat or be left out, and their number may change.

        Raises:
            ValueError: unless the cache has a batch dimension and `index` lists entries of it.
        """
        if not self.batch:
            raise ValueError("index cannot reorder a cache without batch dimensions, batch=[]")
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
        """A copy that shares no memory with this cache: the text branches in two."""
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
        with torch.inference_mode(False):  # what is unpickled there could not be written outside
            self.buffers = {
                name: buffer.clone() if buffer.is_inference() else buffer
                for name, buffer in self.buffers.items()
            }

    def __repr__(self) -> str:
        back = f"rollback={self.rollback}, " if self.rollback else ""
        facts = f"batch={list(self.batch)}, window={self.window}, {back}position={self.position}"
        return f"{type(self).__name__}({self.owner[0]}, {facts}, {self.num_bytes} bytes)"
