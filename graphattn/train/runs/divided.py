"""A model whose sequences are divided among the ranks of a group, as objectives call it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.distributed.agreement import agree
from graphattn.distributed.losses import same_loss_on_all_ranks
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.distributed.sharding import shard
from graphattn.graphs import TokenGraph
from graphattn.models.token_model import TokenModel
from graphattn.train.runs.heads import WithHead

KEPT = 8  # numbers of tokens for which divided graphs are kept
DIVIDED = ("valid", "positions", "noise_level", "tracks")  # arguments that a call may have


class Divided(nn.Module):
    """A model that gets whole sequences on every rank of a group, and computes on its own tokens.

    Every rank calls it with equal arguments. The output is gathered, so every rank has that of all
    tokens and computes the same loss from it; the gradients are right if ranks average them. With
    ``gathers=False`` the outputs stay where they are. Then an objective guesses only at the tokens
    of its rank (:meth:`own_tokens`), and no rank stores the logits of a whole sequence.

    Args:
        model: a model of tokens with a method ``graphs(num_tokens)``.
        group: the process group.

    Raises:
        ValueError: for a model of another kind, such as one of images; in a call, if tokens differ
            between ranks.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        super().__init__()
        inside = model.model if isinstance(model, WithHead) else model
        if not isinstance(inside, TokenModel):
            raise ValueError(
                "context_parallel must be 1 for a model that is not a CausalLM, SequenceEncoder or "
                f"ProteinModel, because only their tokens can be divided, got one of a "
                f"{type(inside).__name__}"
            )
        if getattr(inside, "context", None):
            raise ValueError(
                "context_parallel must be 1 for a model with tracks of context, whose graphs are "
                "not divided, got a ProteinModel(..., context=...)"
            )
        self.module: Any = model
        self.group, self.ranks = group, torch.distributed.get_world_size(group)
        self._shards: dict[int, list[ShardedGraph]] = {}
        # A ring takes no bias per edge, which the edges of residues have.
        self._exchange: Any = "rows" if getattr(inside, "structure", False) else "auto"

    def _shards_of(self, num_tokens: int) -> tuple[list[ShardedGraph], int]:
        """Return this rank's part of the graph of every block, and how much padding they have.

        Short sequences are padded, so that every rank has tokens in both of its runs.
        """
        known, size = self._shards, max(num_tokens, 2 * self.ranks)
        if size not in known:
            if len(known) == KEPT:  # the oldest, on all ranks the same one
                del known[next(iter(known))]
            known[size] = self._parts(self.module.graphs(size))
        return known[size], size - num_tokens

    def _parts(self, graphs: Sequence[TokenGraph]) -> list[ShardedGraph]:
        made: dict[int, ShardedGraph] = {}
        for graph in graphs:
            if id(graph) not in made:
                made[id(graph)] = shard(graph, self.group, exchange=self._exchange)
        return [made[id(graph)] for graph in graphs]

    def forward(
        self, tokens: Tensor, *, structure: Any = None, gathers: bool = True, **given: Any
    ) -> Any:
        """Return the outputs of the model for tokens [*, N]; see the class for `gathers`."""
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in DIVIDED:
                raise ValueError(
                    f"context_parallel must be 1 for batches with {name!r}, which is not divided "
                    f"among ranks: only {', '.join(DIVIDED)} and structures are. With packed=True, "
                    "an objective makes graphs of its own"
                )
        self._agree_on(tokens)
        if structure is not None:
            return self._in_space(tokens, structure, **given)
        N = tokens.shape[-1]
        shards, more = self._shards_of(N)
        part = shards[0]
        if more:
            given.setdefault("valid", torch.ones_like(tokens, dtype=torch.bool))

        def own(x: Tensor) -> Tensor:
            part_of: Tensor = part.split(functional.pad(x, (0, more)), dim=-1)
            return part_of

        for name, x in given.items():
            if name == "tracks":
                given[name] = {track: own(codes) for track, codes in x.items()}
            elif name != "noise_level" or x.shape == tokens.shape:  # not one per sequence
                given[name] = own(x)
        outputs = self.module(own(tokens), shards, **given)
        if not gathers:
            return outputs
        return _of_each(outputs, lambda x: self._gathered(part, x)[..., :N, :])

    def _agree_on(self, tokens: Tensor) -> None:
        """Raise a ValueError on all ranks if an objective gives them different tokens."""
        digest = hashlib.blake2b(tokens.cpu().numpy().tobytes(), digest_size=8).hexdigest()
        name = "tokens of a call, with masks drawn from the generator that loss() gets,"
        agree(self.group, {name: f"{list(tokens.shape)} {digest}"})

    def _in_space(
        self, tokens: Tensor, structure: Any, valid: Tensor | None = None, tracks: Any = None
    ) -> Any:
        """Return the outputs for padded rows [B, N] of residues, packed for the call."""
        where = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        shards = self._parts(self.module.graphs(structure=structure))
        part = shards[0]
        more = {}
        if tracks is not None:
            more["tracks"] = {name: part.split(codes[where]) for name, codes in tracks.items()}
        outputs = self.module(part.split(tokens[where]), shards, structure=structure, **more)

        def in_rows(x: Tensor) -> Tensor:
            x = self._gathered(part, x)
            rows = x.new_zeros(*tokens.shape, x.shape[-1])
            return rows.index_put((where,), x)

        return _of_each(outputs, in_rows)

    def _gathered(self, part: ShardedGraph, x: Tensor) -> Tensor:
        return same_loss_on_all_ranks(part.gather(x, dim=-2), part.ranks)

    # For objectives that guess at tokens.

    def own_tokens(self, num_tokens: int) -> Tensor:
        """Return the tokens that this rank owns, bool [N]."""
        shards, more = self._shards_of(num_tokens)
        mine = torch.zeros(num_tokens + more, dtype=torch.bool)
        mine[shards[0].split(torch.arange(len(mine)))] = True
        return mine[:num_tokens]

    def own_rows(self, where: Tensor) -> Tensor:
        """Return this rank's columns of a mask [*, N], in the order of outputs that stay here."""
        shards, more = self._shards_of(where.shape[-1])
        rows: Tensor = shards[0].split(functional.pad(where, (0, more)))
        return rows


def _of_each(outputs: Any, function: Any) -> Any:
    """Apply a function to an output, or to those of all tracks."""
    if isinstance(outputs, dict):
        return {name: function(x) for name, x in outputs.items()}
    return function(outputs)
