"""Likelihoods: of sequences under a diffusion model, and of samples under a judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from graphattn.graphs.arguments import as_int
from graphattn.ops.inputs import check_valid, compute_dtype, full_precision
from graphattn.train.batches import device_of
from graphattn.train.checks import check_range, described
from graphattn.train.diffusion.calling import (
    Denoiser,
    call,
    check_generator,
    logits_of,
    without_dropout,
)
from graphattn.train.diffusion.noise import Noise, as_noise
from graphattn.train.diffusion.objective import as_t_min, diffusion_losses, prior_loss
from graphattn.train.diffusion.score_entropy import check_no_masks, score_entropy_parts


@dataclass(frozen=True)
class Likelihood:
    """Negative log-likelihoods of sequences, or bounds on them.

    Attributes:
        nats: the number of nats of every sequence, [*].
        num_tokens: the number of counted tokens of every sequence, integers [*].
        standard_error: the standard error of :attr:`per_token`.

    Example:
        >>> import torch
        >>> from graphattn.train import Likelihood
        >>> Likelihood(torch.tensor([3.0, 5.0]), torch.tensor([2, 2]), 0.1).per_token
        2.0
    """

    nats: Tensor
    num_tokens: Tensor
    standard_error: float

    @property
    def per_token(self) -> float:
        """Return the nats per token, over all sequences."""
        return float(self.nats.double().sum()) / max(int(self.num_tokens.sum()), 1)

    @property
    def perplexity(self) -> float:
        """Return exp(nats per token)."""
        return math.exp(self.per_token) if self.per_token < 700 else math.inf

    def __repr__(self) -> str:
        count = self.nats.numel()
        return (
            f"Likelihood({self.per_token:.4f} +- {self.standard_error:.4f} nats per token, "
            f"{count} sequence{'s' * (count != 1)})"
        )


@torch.no_grad()
def likelihood_bound(
    model: Denoiser,
    tokens: Tensor,
    *,
    mask_token: int,
    noise: str | Noise = "log-linear",
    samples: int = 64,
    t_min: float = 1e-3,
    valid: Tensor | None = None,
    generator: Generator | None = None,
    batch_size: int = 64,
    **given: Any,
) -> Likelihood:
    r"""Estimate an upper bound on the negative log-likelihood of sequences, in nats.

    .. math::
        -\log p(x) \;\le\; \int_{t_{\min}}^1 \sigma' \, \mathbb{E}\, \mathrm{DSE} \; dt
        \;+\; \mathbb{E}_{t_{\min}} \sum_{i \text{ masked}} -\log \mathrm{softmax}(z_i)_{x_i}
        \;+\; N e^{-\sigma(1)} \log V

    The three terms are the loss of :class:`AbsorbingDiffusion`, the tokens that are still masked at
    `t_min`, and the start of generation. Two times are drawn in each of ``samples / 2`` equal parts
    of [t_min, 1]. The estimate then varies less than with independent times, and its standard error
    is still known.

    Source: Lou et al. 2024 (SEDD), Theorem 3.6.

    Args:
        model: a model as in :func:`sample_diffusion`. The bound depends on the logits themselves,
            not only on their softmax (add log V to log-probabilities).
        tokens: integers [*, N], without masks.
        mask_token: the token of a masked position.
        noise: the noise schedule of the training.
        samples: an even number >= 2: calls of the model per sequence. The second term needs at most
            the same number again, usually far fewer, because it rarely masks a token.
        t_min: start of the integral, in [0, 1).
        valid: bool [N] or [*, N]; padding is not counted; the model also gets this mask.
        generator: random generator for times and masks; None for torch's default.
        batch_size: sequences per call.
        given: further arguments of the model, such as a graph.

    Returns:
        The bounds; ``standard_error`` is the error of their estimate.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> chain = ga.train.MarkovChain(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> tokens = chain.sample((100, 8), torch.Generator().manual_seed(0))
        >>> exact = -chain.log_probability(tokens).sum() / tokens.numel()
        >>> bound = ga.train.likelihood_bound(
        ...     chain, tokens, mask_token=2, generator=torch.Generator().manual_seed(1))
        >>> abs(bound.per_token - float(exact)) < 4 * bound.standard_error + 1e-3
        True
    """
    mask_token = as_int("mask_token", mask_token, 0)
    samples = as_int("samples", samples, 2)
    if samples % 2:
        raise ValueError(f"samples must be an even number >= 2, got {samples}")
    size = as_int("batch_size", batch_size, 1)
    schedule, t_min = as_noise(noise), as_t_min(t_min)
    check_generator(generator)
    tokens, real = _sequences("tokens", tokens, valid)
    check_no_masks(tokens, real, mask_token)
    device = device_of(model, tokens)
    batch = tokens.shape[:-1]
    rows, kept = (x.reshape(-1, x.shape[-1]).to(device) for x in (tokens, real))
    nats, variances = [], []
    with without_dropout(model):
        for some, real_rows in zip(rows.split(size), kept.split(size), strict=True):
            extra = {**given, "valid": None if valid is None else real_rows}
            first_time = torch.full(some.shape[:1], t_min, device=device)
            estimates, num_tokens = [], 1
            for k in range(samples):
                u = torch.rand(len(some), generator=generator, device=device)
                t = 1 - (1 - t_min) * (k // 2 + u) / (samples // 2)
                masked = _masked(real_rows, schedule.mask_probability(t), generator)
                entropy, penalty, num_tokens = diffusion_losses(
                    model, some, masked, t, mask_token, schedule, **extra
                )
                estimate = (1 - t_min) * (entropy + penalty).double().sum(-1)
                masked = _masked(real_rows, schedule.mask_probability(first_time), generator)
                if bool(masked.any()):  # tokens that are still masked at t_min
                    inputs = some.masked_fill(masked, mask_token)
                    logits = call(model, inputs, schedule.total(first_time), **extra)
                    entropy, _ = score_entropy_parts(logits, some, masked, mask_token)
                    estimate += entropy.double().sum(-1)
                estimates.append(estimate)
            pairs = torch.stack(estimates).view(samples // 2, 2, -1)
            start = real_rows.sum(-1) * prior_loss(schedule, num_tokens)
            nats.append(pairs.mean((0, 1)) + start)
            variances.append((pairs[:, 0] - pairs[:, 1]).square().sum(0) / samples**2)
    counts = kept.sum(-1)
    error = float(torch.cat(variances).sum().sqrt()) / max(int(counts.sum()), 1)
    return Likelihood(torch.cat(nats).view(batch), counts.view(batch), error)


@torch.no_grad()
def generative_nll(
    samples: Tensor,
    judge: Callable[..., Any],
    *,
    valid: Tensor | None = None,
    start_token: int | None = None,
    batch_size: int = 64,
) -> Likelihood:
    """Measure samples by their negative log-likelihood under a judge.

    The consensus paper averages it over 1000 samples of a text model, under GPT-2 Large (Appendix
    E.1, E.2). A low value alone does not mean good samples: repeated words are likely.

    Args:
        samples: integers [*, N], in the vocabulary of the judge.
        judge: a causal model, such as :class:`~graphattn.models.CausalLM` or one of transformers:
            tokens [B, N] to logits [B, N, vocab_size] of the next token (or an object with these as
            ``logits``); or a function from tokens [B, N] to log-probabilities of whole sequences
            [B], such as ``MarkovChain.log_probability``.
        valid: bool [N] or [*, N]: padding on the right, for samples of different lengths.
        start_token: a token that a causal judge reads before each sample. Without it, the first
            token of a sample has no probability and is not counted.
        batch_size: samples per call.

    Returns:
        A :class:`Likelihood` with ``nats`` of every sample. Its ``standard_error`` is that of the
        mean over independent samples (0 for a single one).

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> text = torch.randint(28, (10, 16))
        >>> ga.train.generative_nll(text, ga.models.CausalLM(28, 16, depth=1, heads=2)).num_tokens
        tensor([15, 15, 15, 15, 15, 15, 15, 15, 15, 15])
        >>> chain = ga.train.MarkovChain(torch.full((28, 28), 1 / 28))
        >>> ga.train.generative_nll(text, chain.log_probability)  # log 28
        Likelihood(3.3322 +- 0.0000 nats per token, 10 sequences)
    """
    size = as_int("batch_size", batch_size, 1)
    samples, real = _sequences("samples", samples, valid)
    if bool((real[..., 1:] & ~real[..., :-1]).any()):
        raise ValueError(
            "valid must be False only at the end of a sample: pad samples on the right"
        )
    batch = samples.shape[:-1]
    device = device_of(judge, samples)
    rows = samples.masked_fill(~real, 0).reshape(-1, samples.shape[-1]).to(device)
    kept = real.reshape(-1, samples.shape[-1]).to(device)
    if start_token is not None:
        start = as_int("start_token", start_token, 0)
        rows = torch.cat([rows.new_full((len(rows), 1), start), rows], -1)
        kept = torch.cat([kept.new_ones(len(kept), 1), kept], -1)
    nats, counts = [], []
    with without_dropout(judge):
        for some, real_rows in zip(rows.split(size), kept.split(size), strict=True):
            output = judge(some)
            if isinstance(output, Tensor) and output.shape == some.shape[:1]:
                if start_token is not None or not bool(real_rows.all()):
                    raise ValueError(
                        "valid and start_token must be None if judge returns one number per "
                        "sequence, because it then judges whole sequences"
                    )
                nats.append(-output.double())
                counts.append(real_rows.sum(-1))
                continue
            logits = logits_of(output, some, "judge")
            check_range(some, logits.shape[-1], "samples or start_token")
            with full_precision(device):
                log_p = logits[:, :-1].to(compute_dtype(logits.dtype)).log_softmax(-1)
                of_token = log_p.gather(-1, some[:, 1:].unsqueeze(-1)).squeeze(-1)
            nats.append(-of_token.double().masked_fill(~real_rows[:, 1:], 0).sum(-1))
            counts.append(real_rows[:, 1:].sum(-1))
    sums, count = torch.cat(nats), torch.cat(counts)
    total, n = max(int(count.sum()), 1), len(sums)
    off = sums - sums.sum() / total * count  # for the standard error of a ratio of two means
    error = math.sqrt(float(off.square().sum()) * n / max(n - 1, 1)) / total
    return Likelihood(sums.view(batch), count.view(batch), error)


def _sequences(name: str, tokens: Any, valid: Any) -> tuple[Tensor, Tensor]:
    """Check tokens [*, N], and return them with the mask of real ones."""
    is_integer = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not is_integer or tokens.dim() == 0 or tokens.numel() == 0:
        raise ValueError(
            f"{name} must be an int32 or int64 tensor [*, N], not empty, got {described(tokens)}"
        )
    if valid is not None:
        check_valid(valid, tokens.shape[:-1], tokens.device, tokens.shape[-1], tokens.shape[-1])
    real = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    return tokens.long(), real.expand(tokens.shape)


def _masked(real: Tensor, share: Tensor, generator: Generator | None) -> Tensor:
    """Mask real tokens [B, N], each with the probability of its row."""
    u = torch.rand(real.shape, generator=generator, device=real.device)
    return (u < share.unsqueeze(-1)) & real
