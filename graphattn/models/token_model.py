"""Models of token sequences: an embedding, a stack of blocks, a head, and steps of generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.models.stack import BlockStack
from graphattn.nn import ModelCache
from graphattn.nn.base.overrides import names_of, replaced_beside
from graphattn.nn.base.streaming import step_mask
from graphattn.nn.rotary import check_positions
from graphattn.ops.inputs import check_valid


class TokenModel(BlockStack):
    """A stack of blocks between `embedding`, `norm` and `head`.

    Subclasses make these, `blocks` and `vocab_size`, and have ``encode(tokens, graph, ...)``, the
    features before the head, and ``forward``, the logits.
    """

    vocab_size: int
    embedding: nn.Embedding
    norm: nn.Module
    head: nn.Linear

    # Token by token.

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | Sequence[int | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> ModelCache:
        """An empty cache for :meth:`step`, with one of every block in it.

        Args:
            batch: the leading dimensions of the tokens to come; () for a single text.
            window: how many tokens each token sees, itself included, as in
                :func:`~graphattn.causal_window_graph`; None for all before it; or a list with one
                of these per block.
            dtype, device: of what is kept; the model's own if None.
            rollback: how many of the newest tokens ``cache.truncate`` can take back at any time.

        Raises:
            ValueError: names the block and its mixer that cannot go token by token and what it
                needs, such as ``SelfConsensus(update="target")`` in the place of "consensus"; for
                arguments out of range; and where a subclass has replaced `forward` or `encode`
                alone.
        """
        self._check_steps()
        windows = window if isinstance(window, list | tuple) else [window] * len(self.blocks)
        if len(windows) != len(self.blocks):
            raise ValueError(
                f"window must be one for all, or one per block ({len(self.blocks)}), "
                f"got {len(windows)}"
            )
        caches = []
        for place, (block, own) in enumerate(zip(self._stack(), windows, strict=True)):
            try:
                made = block.init_cache(batch, own, dtype=dtype, device=device, rollback=rollback)
            except ValueError as error:
                raise ValueError(f"block {place}: {error}") from error
            caches.append(made)
        return ModelCache(caches)

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, or of the next few, which the cache then holds too.

        T steps give what one forward over all T tokens gives in evaluation mode on the graphs
        ``causal_window_graph(T, window)`` of the windows that the cache was made with
        (``causal_graph(T)`` for None), to rounding. Not on the graphs that `forward` chooses by
        itself, which see later tokens. There is no gradient: `forward` is for training.

        Args:
            tokens: integers [*], the next of every text, or [*, n], the next n; * is the batch of
                the cache.
            cache: from this model's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real. A text that starts later than
                others of its batch is padded on the left.
            positions: [*] (or [*, n]), where tokens stand for rotary embeddings; counted from 0 by
                the cache if None.

        Returns:
            [*, vocab_size] or [*, n, vocab_size].

        Raises:
            ValueError: as :meth:`init_cache`, and for what does not fit the model or the cache.

        Example:
            >>> import torch, graphattn as ga
            >>> model = ga.models.SequenceEncoder(28, dim=32, depth=2, heads=4)
            >>> cache = model.init_cache(1, window=16)
            >>> text = torch.randint(28, (1, 5))
            >>> logits = model.step(text, cache)[:, -1]
            >>> for _ in range(20):
            ...     logits = model.step(logits.argmax(-1), cache)
            >>> cache.position
            25
        """
        return self.head(self.encode_step(tokens, cache, valid=valid, positions=positions))

    @torch.no_grad()
    def encode_step(
        self,
        tokens: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The features of :meth:`step` before the head, [*, dim] or [*, n, dim].

        Of a prompt, the head is often wanted of the last token alone.
        """
        self._check_steps()
        if not isinstance(cache, ModelCache) or len(cache) != len(self.blocks):
            got = f"one of {len(cache)}" if isinstance(cache, ModelCache) else type(cache).__name__
            raise ValueError(
                f"cache must be a ModelCache of {len(self.blocks)} layers, from init_cache, "
                f"got {got}"
            )
        batch, _ = cache.batch, cache.position  # both refuse a cache that was broken off
        single = isinstance(tokens, Tensor) and tokens.shape == batch
        if isinstance(tokens, Tensor) and not single and tokens.shape[:-1] != batch:
            raise ValueError(
                f"tokens must have shape {list(batch)} (one of every text) or "
                f"[{', '.join(map(str, [*batch, 'n']))}] with a cache of batch {list(batch)}, "
                f"got {list(tokens.shape)}"
            )
        if single:
            tokens = tokens.unsqueeze(-1)
            if isinstance(positions, Tensor):
                positions = positions.unsqueeze(-1)
        # All is checked before the first layer goes on, so that they stay together.
        n = tokens.shape[-1] if isinstance(tokens, Tensor) else 0
        valid = step_mask(valid, batch, None if single else n, self.embedding.weight.device)
        tokens = self._readable(tokens, valid)
        if positions is not None:
            check_positions(positions, tokens.shape)
        x = self.embedding(tokens)
        for block, own in zip(self._stack(), cache, strict=True):
            x = block.step(x, own, valid=valid, positions=positions)
        x = self.norm(x)
        return x.squeeze(-2) if single else x

    def _stack(self) -> Iterable[Any]:
        """The blocks, which are PreNormBlocks or have what those have."""
        return self.blocks

    def _check_steps(self) -> None:
        """Steps run neither `forward` nor `encode`: refuse where those were replaced."""
        names = ("forward", "encode")
        if replaced := replaced_beside(self, names, ("step", "encode_step")):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so it would "
                "not give what forward gives: override step, too"
            )

    def _readable(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """The tokens, checked; padding may hold any number and is set to 0."""
        if (
            not isinstance(tokens, Tensor)
            or tokens.dim() < 1
            or tokens.dtype not in (torch.int32, torch.int64)
        ):
            got = (
                f"{tokens.dtype} of shape {list(tokens.shape)}"
                if isinstance(tokens, Tensor)
                else type(tokens).__name__
            )
            raise ValueError(f"tokens must be an int32 or int64 tensor of shape [*, N], got {got}")
        if valid is not None:
            if not isinstance(valid, Tensor):
                raise ValueError(f"valid must be a bool tensor, got {type(valid).__name__}")
            N = tokens.shape[-1]
            check_valid(valid, tokens.shape[:-1], tokens.device, N, N)
            tokens = tokens.masked_fill(~valid, 0)
        # Values are read where that costs nothing: not on a GPU, in torch.func, or while tracing.
        traced = (
            torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
        )
        if tokens.device.type == "cpu" and tokens.numel() > 0 and not traced:
            least, most = tokens.aminmax()
            if least < 0 or most >= self.vocab_size:
                bad = int(least if least < 0 else most)
                raise ValueError(
                    f"tokens must be 0 .. {self.vocab_size - 1} (vocab_size - 1), got {bad}"
                )
        return tokens
