"""Causal language modelling: every token is guessed from the tokens before it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from graphattn.graphs.arguments import as_choice, as_float
from graphattn.train.batches import call, collate_tokens, guessed_here, outputs_at, unwrapped
from graphattn.train.objectives.objective import (
    Batch,
    Example,
    Guesses,
    LikelihoodObjective,
    Loss,
    loss_of,
    nats,
    num_right,
)


class NextToken(LikelihoodObjective):
    r"""Causal language modelling: the model's output at a token is a guess of the next token.

    The loss is the mean over all tokens but the first of every sequence, in nats per token:

    .. math::
        \frac{1}{\sum_b (N_b - 1)} \sum_b \sum_{i \geq 2} -\log p(x_{b,i} \mid x_{b,1 .. i-1})

    Windows of a document are separate sequences: no token is guessed or seen across their borders.
        Evaluations report bits per token and, if the bytes are known, bits per byte, with which
        different tokenizers can be compared: the bits of all guessed tokens divided by the bytes of
        these tokens.

    Args:
        bytes_per_token: average number of bytes per token; or a list with the bytes of every token
            of the vocabulary, which is exact. 1 if tokens are bytes. None: do not report bits per
            byte.
        packed: pack sequences of unequal lengths into one row, over graphs without edges between
            them, instead of padding rows. The outputs do not change.

    Raises:
        ValueError: if an argument is not allowed; in `loss`, also if the graphs of the model let a
            token see later tokens.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.CausalLM(256, dim=16, depth=1, heads=2)
        >>> objective = ga.train.NextToken(bytes_per_token=1)
        >>> texts = [b"To be, or not to be", b"that is the question"]
        >>> batch = objective.collate([{"tokens": torch.tensor(list(text))} for text in texts])
        >>> loss = objective.loss(model, batch)
        >>> loss.count  # 19 + 20 bytes, two of which are the first
        37
        >>> sorted(objective.evaluate(model, [batch]))
        ['accuracy', 'bits_per_byte', 'bits_per_token', 'loss', 'perplexity']
    """

    name = "causal"

    def __init__(
        self, bytes_per_token: float | Sequence[float] | None = None, *, packed: bool = False
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self._bytes = _as_bytes(bytes_per_token)
        self.packed = as_choice("packed", packed, (False, True))

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join sequences into one batch."""
        return collate_tokens(examples)

    def guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Guesses:
        """Return logits [n, vocab_size] for all tokens but each first, and these tokens [n].

        The model also reads the last token, although its output is not used, so that lengths such
        as powers of 2 do not change.
        """
        _check_causal(unwrapped(model))
        tokens, valid = batch["tokens"], batch.get("valid")
        if valid is None and not hasattr(model, "own_tokens"):
            logits, _ = call(model, tokens, batch)
            if logits.shape[:-1] != tokens.shape:
                raise ValueError(
                    f"model must return logits [B, N, K] for tokens {list(tokens.shape)}, got "
                    f"{list(logits.shape)}"
                )
            return logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
        before = torch.zeros_like(valid)
        # Neither the token nor the one after it is padding.
        before[:, :-1] = valid[:, :-1] & valid[:, 1:]
        before = guessed_here(model, before, batch)
        is_guessed = before.roll(1, 1)  # the first column becomes the last one, which is False
        return outputs_at(model, tokens, batch, before, packed=self.packed), tokens[is_guessed]

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the nats of all tokens but each first, "accuracy", and "bytes" if known."""
        logits, truth = self.guesses(model, batch, generator)
        sums = {"accuracy": num_right(logits, truth)}
        if isinstance(self._bytes, float):
            sums["bytes"] = self._bytes * len(truth)
        elif self._bytes is not None:
            if self._bytes.numel() != logits.shape[-1]:
                raise ValueError(
                    "bytes_per_token must contain one number per token of the vocabulary "
                    f"({logits.shape[-1]}), got {self._bytes.numel()}"
                )
            sums["bytes"] = float(self._bytes.to(truth.device)[truth].sum())
        return loss_of(nats(logits, truth), len(truth), sums, (logits, truth))

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Return loss, perplexity, accuracy, bits per token and (if known) bits per byte."""
        means = dict(means)
        num_bytes = means.pop("bytes", 0.0)
        report = super().report(mean, means)
        report["bits_per_token"] = mean / math.log(2)
        if num_bytes:
            report["bits_per_byte"] = mean / math.log(2) / num_bytes
        return report


_CAUSAL: weakref.WeakSet[Any] = weakref.WeakSet()  # models that have passed the check below


def _as_bytes(value: Any) -> float | Tensor | None:
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return as_float("bytes_per_token", value, positive=True)
    try:
        table = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError):
        table = torch.zeros(())
    if table.dim() != 1 or not len(table) or not ((table >= 0) & table.isfinite()).all():
        raise ValueError(
            "bytes_per_token must be a number > 0, or one finite number >= 0 per token, got "
            f"{value!r:.80}"
        )
    return table


def _check_causal(model: Any) -> None:
    """Raise a ValueError if the graphs of a model let tokens see later ones."""
    if not hasattr(model, "graphs") or model in _CAUSAL:
        return
    for place, graph in enumerate(model.graphs(4)):
        source, target = graph.edge_index
        if bool((source > target).any()):
            raise ValueError(
                "model must let a token see only itself and earlier tokens, as CausalLM does, but "
                f"in block {place} of this {type(model).__name__} it sees the token that it guesses"
            )
    _CAUSAL.add(model)
