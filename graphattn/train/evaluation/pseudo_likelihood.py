"""Pseudo-perplexity: how well a masked model guesses each token from all the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from graphattn.graphs.arguments import as_int
from graphattn.models.proteins.scores import evaluating
from graphattn.train.batches import collate_tokens, device_of, outputs_at
from graphattn.train.checks import is_integer
from graphattn.train.objectives.objective import Example, nats


def pseudo_log_likelihood(
    model: nn.Module,
    example: Example | Tensor,
    mask_token: int,
    *,
    positions: Tensor | None = None,
    batch_size: int = 32,
) -> Tensor:
    r"""Return the log-probability of every token, given all others, with only that token masked.

    .. math::
        \log p(x_i \mid x_{\setminus i})

    The model runs on one copy of the sequence per token, `batch_size` copies at once.

    Args:
        model: a model of masked tokens; it runs in evaluation mode.
        example: tokens, a LongTensor [N]; or a dict with these, and a structure and context.
        mask_token: the token of a masked position.
        positions: the tokens to guess, integers [n]; all if None.
        batch_size: number of copies per call.

    Returns:
        [N], or [n] for `positions`, in nats; float32, or float64 if the model's output is.

    Source:
        Salazar et al., 2020, *Masked Language Model Scoring*: the terms of the PLL.

    Example:
        >>> import graphattn as ga
        >>> model = ga.models.ProteinModel(16, depth=1, heads=2)
        >>> tokens = model.tokenizer.encode("MKVLAGHW")
        >>> log_p = ga.train.pseudo_log_likelihood(model, tokens, model.mask_token)
        >>> log_p.shape, bool((log_p < 0).all())
        (torch.Size([8]), True)
    """
    batch_size = as_int("batch_size", batch_size, 1)
    mask_token = as_int("mask_token", mask_token, 0)
    if isinstance(example, Tensor):
        example = {"tokens": example}
    one = collate_tokens([example])
    device = device_of(model)
    tokens = one["tokens"][0].to(device)
    asked = torch.arange(len(tokens)) if positions is None else torch.as_tensor(positions)
    if asked.dim() != 1 or (
        len(asked)
        and not (is_integer(asked) and 0 <= int(asked.min()) <= int(asked.max()) < len(tokens))
    ):
        raise ValueError(
            f"positions must be integers [n] in 0 .. {len(tokens) - 1}, got {positions!r:.80}"
        )
    log_likelihoods = []
    with evaluating(model):
        for some in asked.long().cpu().split(batch_size):
            copies = tokens.repeat(len(some), 1)
            where = torch.zeros_like(copies, dtype=torch.bool)
            where[torch.arange(len(some)), some] = True
            batch = {key: _of_copies(key, value, len(some), device) for key, value in one.items()}
            logits = outputs_at(model, copies.masked_fill(where, mask_token), batch, where)
            log_likelihoods.append(-nats(logits, copies[where]))
    return torch.cat(log_likelihoods) if log_likelihoods else torch.zeros(0, device=device)


def pseudo_perplexity(
    model: nn.Module,
    examples: Iterable[Example | Tensor],
    mask_token: int,
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    generator: Generator | None = None,
) -> float:
    r"""Return the pseudo-perplexity of a model on sequences: 1 if it is always right and certain.

    .. math::
        \exp\left(-\frac{1}{\sum_b N_b} \sum_b \sum_{i=1}^{N_b}
            \log p(x_{b,i} \mid x_{b, \setminus i})\right)

    Each token is guessed with only itself masked, from all others of its sequence. The mean is over
    the tokens of all sequences, so long sequences count more. It is not the perplexity of a
    distribution over sequences, so do not compare it with that of :class:`NextToken`.

    Args:
        model: a model of masked tokens.
        examples: tokens [N], or dicts with these, a structure and context.
        mask_token: the token of a masked position.
        batch_size: number of copies of a sequence per call.
        max_tokens: maximal number of tokens to guess per sequence, drawn without replacement; their
            mean then counts for the whole sequence. None for all tokens.
        generator: source of the random numbers of `max_tokens`.

    Raises:
        ValueError: if an argument is not allowed (the message names it and says what is allowed),
            or if there is no sequence.

    Source:
        Salazar et al., 2020, *Masked Language Model Scoring*: the PPPL.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(5, dim=16, depth=1, heads=2, zero_head=True)
        >>> texts = [torch.tensor([0, 1, 2, 3]), torch.tensor([3, 2])]
        >>> round(ga.train.pseudo_perplexity(model, texts, mask_token=4), 4)  # five tokens alike
        5.0
    """
    if max_tokens is not None:
        max_tokens = as_int("max_tokens", max_tokens, 1)
    total, count = 0.0, 0
    for example in [examples] if isinstance(examples, Tensor) else examples:
        length = len(example if isinstance(example, Tensor) else example["tokens"])
        positions = None
        if max_tokens is not None and max_tokens < length:
            device = "cpu" if generator is None else generator.device
            drawn = torch.randperm(length, generator=generator, device=device)
            positions = drawn[:max_tokens].sort().values.cpu()
        log_likelihood = pseudo_log_likelihood(
            model, example, mask_token, positions=positions, batch_size=batch_size
        )
        total, count = total + length * float(log_likelihood.double().mean()), count + length
    if not count:
        raise ValueError("examples must contain at least one sequence, got none")
    return math.exp(-total / count) if -total / count < 700 else math.inf


def _of_copies(key: str, value: Any, copies: int, device: torch.device) -> Any:
    """Repeat a batch of one sequence for several copies of it."""
    if key in ("context", "tracks"):
        return {name: _of_copies("", track, copies, device) for name, track in value.items()}
    if isinstance(value, Tensor):
        return value.to(device).expand(copies, *value.shape[1:])
    return value[0]  # a structure, which is the same for all copies
