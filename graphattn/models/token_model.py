"""Models of token sequences: an embedding, a stack of blocks, a head, and steps of generation.

The head may share its weight with the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph, shard_like
from graphattn.graphs import (
    TokenGraph,
    causal_graph,
    causal_window_graph,
    complete_graph,
    window_path_graph,
)
from graphattn.models.mixers import Reach
from graphattn.models.stack import BlockStack, embeds_values, one_each
from graphattn.near_names import explained
from graphattn.nn import ModelCache
from graphattn.nn.base.overrides import is_ours, names_of, replaced_beside
from graphattn.nn.base.streaming import step_mask
from graphattn.nn.blocks.compiled_step import BlockRun, UnknownModuleError
from graphattn.nn.caches.divided_cache import cache_over_ranks
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
    reaches: list[Reach]  # of every block
    window: int  # tokens on each side, for the blocks that have one
    windows: list[int | None] | None = None  # keys that every block of a causal model sees

    # The parts of `forward` that models share.

    def _logits_of(self, tokens: Tensor, graph: Any, **given: Any) -> Tensor:
        """Encode tokens and apply the head."""
        return self._apply_head(self._features_of(tokens, graph, **given))

    def _features_of(self, tokens: Tensor, graph: Any, **given: Any) -> Tensor:
        """Encode tokens.

        A subclass may have an `encode` without the rarer arguments, so None is not passed on.
        """
        encode: Any = self.encode
        given = {name: value for name, value in given.items() if value is not None}
        features: Tensor = encode(tokens, graph, **given)
        return features

    def _apply_head(self, features: Tensor) -> Tensor:
        return self.head(features)

    def embed_tokens(
        self,
        tokens: Tensor,
        *,
        start: int = 0,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the features of tokens [*, N] before the first block, [*, N, dim].

        Args:
            tokens: integers [*, N].
            start: the position of the first token.
            positions: [N] or [*, N], which replace start, start + 1, ...
            valid: bool [N] or [*, N], True where a token is real.
        """
        features: Tensor = self.embedding(tokens)
        return features

    def tokens_of_values(self, tokens: Tensor) -> Tensor | None:
        """Return the tokens if a block adds embeddings of them to its values, or None."""
        return tokens if any(map(_embeds_values, self._stack())) else None

    @property
    def position_table(self) -> Any:
        """The embedding of learned positions; None if there is none."""
        return self._modules.get("position_embedding")

    def check_length(self, num_tokens: int) -> None:
        """Raise a ValueError if a text of so many tokens is too long for the model."""

    def _graphs_of_reaches(self, num_tokens: int) -> list[TokenGraph]:
        """Return one graph per block for a sequence, by what its mixer sees."""
        device = self.embedding.weight.device

        def graph_of(reach: Reach) -> TokenGraph:
            if reach == "all":
                return complete_graph(num_tokens).to(device)
            loops = reach == "window"
            return window_path_graph(num_tokens, self.window, self_loops=loops).to(device)

        return one_each(self.reaches, graph_of)

    # Generation, token by token.

    @explained
    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | Sequence[int | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
        shard: ShardedGraph | None = None,
    ) -> ModelCache:
        """Make an empty cache for :meth:`step`, with one layer cache per block.

        Args:
            batch: the leading dimensions of the tokens that will follow; () for a single text.
            window: how many tokens each token sees, itself included, as in
                :func:`~graphattn.causal_window_graph`; or a list with one such number per block,
                None for all earlier tokens. None alone means the model's own windows, if it has
                any (:class:`CausalLM`), and all earlier tokens otherwise.
            dtype, device: dtype and device of the stored tensors; None takes the model's own.
            rollback: how many of the newest tokens ``cache.truncate`` can remove at any time.
            shard: this rank's part of a graph over the prompt, for a prompt that ranks divide: its
                group, number of tokens and order count. Then all ranks make the cache and take the
                same steps. The first one gets this rank's tokens, ``shard.split(prompt)``, and
                returns their logits; all others get the same tokens on every rank. Keys and values
                are stored by the rank that owns them, later tokens in turn. All ranks store windows
                of at most the tokens of a rank, those of linear attention and consensus, and the
                sums of linear attention without a window.

        Raises:
            ValueError: if the mixer of a block cannot generate token by token (the message says
                what to use instead, such as ``SelfConsensus(update="target")`` for "consensus"), if
                an argument is out of range, or if a subclass has replaced `forward` or `encode` but
                not the steps. With `shard`, also for "dot+krause", and for consensus and layers
                with their own messages without a window.
        """
        self._check_steps()
        window = self.windows if window is None else window
        windows = window if isinstance(window, list | tuple) else [window] * len(self.blocks)
        if len(windows) != len(self.blocks):
            raise ValueError(
                "window must be one number for all blocks, or a list with one per block "
                f"({len(self.blocks)}), got {len(windows)}"
            )
        caches = []
        parts: dict[int | None, ShardedGraph] = {}
        for place, (block, width) in enumerate(zip(self._stack(), windows, strict=True)):
            try:
                made = block.init_cache(batch, width, dtype=dtype, device=device, rollback=rollback)
                if shard is not None:
                    made = cache_over_ranks(block.mixer, made, _shard_of(shard, width, parts))
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
        """Read the next token, or the next n, into the cache, and return their logits.

        T steps give the same logits as one call of `forward` over all T tokens in evaluation mode,
        up to rounding, with the graphs ``causal_window_graph(T, window)`` for the windows of the
        cache (``causal_graph(T)`` for None). In a model that is not causal, they differ from a call
        without graphs, in which tokens also see later ones. A step computes no gradients; use
        `forward` for training.

        Args:
            tokens: integers [*], the next of every text, or [*, n], the next n; * is the batch of
                the cache.
            cache: from this model's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real. A text that starts later than
                others of its batch is padded on the left.
            positions: [*] (or [*, n]), positions of the tokens for rotary embeddings. If None, the
                cache counts them from 0.

        Returns:
            [*, vocab_size] or [*, n, vocab_size].

        Raises:
            ValueError: for the same reasons as :meth:`init_cache`, and if an argument does not fit
                the model or the cache.

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
        return self._apply_head(self.encode_step(tokens, cache, valid=valid, positions=positions))

    @torch.no_grad()
    def encode_step(
        self,
        tokens: Tensor,
        cache: ModelCache,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Make a step and return the features before the head, [*, dim] or [*, n, dim].

        Use it for prompts: often only the last token needs the head.
        """
        self._check_steps()
        if not isinstance(cache, ModelCache) or len(cache) != len(self.blocks):
            got = f"one of {len(cache)}" if isinstance(cache, ModelCache) else type(cache).__name__
            raise ValueError(
                f"cache must be a ModelCache with {len(self.blocks)} layers, made by init_cache, "
                f"got {got}"
            )
        batch, _ = cache.batch, cache.position  # both raise an error if a step was interrupted
        single = isinstance(tokens, Tensor) and tokens.shape == batch
        if isinstance(tokens, Tensor) and not single and tokens.shape[:-1] != batch:
            raise ValueError(
                f"tokens must have shape {list(batch)} (one per text) or "
                f"[{', '.join(map(str, [*batch, 'n']))}] (n per text), because the cache has batch "
                f"{list(batch)}, got {list(tokens.shape)}"
            )
        if single:
            tokens = tokens.unsqueeze(-1)
            if isinstance(positions, Tensor):
                positions = positions.unsqueeze(-1)
        # Check everything before the first layer changes its cache, so that all caches stay equal.
        n = tokens.shape[-1] if isinstance(tokens, Tensor) else 0
        valid = step_mask(valid, batch, None if single else n, self.embedding.weight.device)
        tokens = self._readable(tokens, valid)
        if positions is not None:
            check_positions(positions, tokens.shape)
        if positions is None and valid is not None and self.position_table is not None:
            raise ValueError(
                "positions must be given with valid in a model with learned positions, because "
                "padding on the left does not count, got None"
            )
        places, shard = positions, getattr(cache.layers[0], "shard", None)
        if shard is not None and cache.position == 0:
            if n != shard.num_targets:
                raise ValueError(
                    f"tokens must be the {shard.num_targets} tokens of the prompt on rank "
                    f"{shard.rank} of {shard.ranks}, shard.split(prompt), in the first step of a "
                    f"cache made with a shard, got {n}"
                )
            places = shard.positions if positions is None else positions
        x = self.embed_tokens(tokens, start=cache.position, positions=places, valid=valid)
        if n == 1:  # as one token, for which blocks have the shortest way
            x, tokens = x.squeeze(-2), tokens.squeeze(-1)
            valid, positions = (None if t is None else t[..., 0] for t in (valid, positions))
        for block, layer_cache in zip(self._stack(), cache, strict=True):
            of_block = {"tokens": tokens} if _embeds_values(block) else {}
            x = block.step(x, layer_cache, valid=valid, positions=positions, **of_block)
        x = self.norm(x)
        return x.unsqueeze(-2) if n == 1 and not single else x

    def _runs(self, cache: ModelCache) -> list[BlockRun] | None:
        """Steps of all blocks that need no further checks; None if C++ code cannot run them.

        They hold for as long as nobody changes the model.
        """
        blocks = list(self._stack())
        if not all(map(is_ours, (self.encode_step, *(block.step for block in blocks)))):
            return None
        x = self.embedding.weight.new_empty(*cache.batch, self.embedding.embedding_dim)
        try:
            return [BlockRun(block, x, layer) for block, layer in zip(blocks, cache, strict=True)]
        except UnknownModuleError:
            return None

    def _stack(self) -> Iterable[Any]:
        """Return the blocks, which are PreNormBlocks or have the same methods."""
        return self.blocks

    def _check_steps(self) -> None:
        """Raise an error if `forward` or `encode` was replaced, because steps run neither."""
        names = ("forward", "encode")
        if replaced := replaced_beside(self, names, ("step", "encode_step")):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so its "
                "outputs would differ from those of forward: override step, too"
            )

    def _readable(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        """Check the tokens, and set padding, which may contain any number, to 0."""
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens.dim() < 1 or tokens.dtype not in (torch.int32, torch.int64):
            got = type(tokens).__name__
            if is_tensor:
                got = f"{tokens.dtype} of shape {list(tokens.shape)}"
            raise ValueError(f"tokens must be an int32 or int64 tensor of shape [*, N], got {got}")
        if valid is not None:
            if not isinstance(valid, Tensor):
                raise ValueError(f"valid must be a bool tensor, got {type(valid).__name__}")
            N = tokens.shape[-1]
            check_valid(valid, tokens.shape[:-1], tokens.device, N, N)
            tokens = tokens.masked_fill(~valid, 0)
        if can_read_cheaply(tokens):
            least, most = tokens.aminmax()
            if least < 0 or most >= self.vocab_size:
                bad = int(least if least < 0 else most)
                raise ValueError(
                    f"tokens must be 0 .. {self.vocab_size - 1} (vocab_size - 1), got {bad}"
                )
        return tokens


class TiedModel(TokenModel):
    """A model of tokens whose head shares its weight with the embedding, if `tie_weights` is set.

    Attributes:
        tie_weights: whether the two share one weight.
    """

    tie_weights: bool = False

    def _keep_tied(self, tie_weights: bool) -> None:
        """Tie the weights in a constructor, when `embedding` and `head` are there."""
        self.tie_weights = tie_weights
        self._tie()
        self.register_load_state_dict_post_hook(_tie_again)

    def _tie(self) -> None:
        if self.tie_weights:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` and tie the weights again: moving to or from the device "meta" separates
        them."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Raise an error if the state dict has two different weights, since one would be lost."""
        names = f"{prefix}embedding.weight", f"{prefix}head.weight"
        given = [state_dict[name] for name in names if name in state_dict]
        if self.tie_weights and len(given) == 2 and not _are_equal(*given):
            errors: list[str] = others[-1]
            errors.append(
                f"{names[1]} must be equal to {names[0]} in a model with tie_weights=True, got two "
                "different weights: make the model with tie_weights=False"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)


def _tie_again(model: TiedModel, _: Any) -> None:
    """Tie the weights again after a state dict was loaded: ``assign=True`` separates them."""
    model._tie()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; tensors on the device "meta" have no values."""
    if a.shape != b.shape or a.is_meta or b.is_meta or a.data_ptr() == b.data_ptr():
        return a.shape == b.shape
    b = b.to(a.device)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _embeds_values(block: Any) -> bool:
    return embeds_values(getattr(block, "mixer", None))


def can_read_cheaply(tensor: Tensor) -> bool:
    """Whether a check may read values: not on a GPU, in torch.func or while tracing."""
    traced = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
    return tensor.device.type == "cpu" and tensor.numel() > 0 and not traced


def _shard_of(shard: Any, window: int | None, made: dict[int | None, ShardedGraph]) -> ShardedGraph:
    """Return this rank's part of the graph that steps with a window are equal to."""
    if not isinstance(shard, ShardedGraph) or not shard.whole.has_same_tokens:
        raise ValueError(
            "shard must be a ShardedGraph over the tokens of the prompt, from "
            f"graphattn.distributed.shard, got {shard!r:.80}"
        )
    if window not in made:
        N = shard.whole.num_targets
        graph = causal_graph(N) if window is None else causal_window_graph(N, window)
        made[window] = shard_like(shard, graph.to(shard.device))
    return made[window]
