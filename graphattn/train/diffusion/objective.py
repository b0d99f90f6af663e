"""Absorbing discrete diffusion as an objective: tokens are masked at all noise levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.train.batches.calling import unwrapped
from graphattn.train.batches.collation import collate_tokens
from graphattn.train.diffusion.calling import Denoiser, call
from graphattn.train.diffusion.noise import Noise, as_noise
from graphattn.train.diffusion.score_entropy import check_no_masks, score_entropy_parts
from graphattn.train.objectives.objective import Batch, Example, Loss, Objective

FOR_THE_MODEL = (
    *("graph", "valid", "positions", "edge_features", "edge_bias", "structure", "context"),
)


class AbsorbingDiffusion(Objective):
    r"""Absorbing discrete diffusion, trained by score entropy (SEDD).

    A time t is drawn for every sequence, every token is masked with probability
    :math:`1 - e^{-\sigma(t)}`, and what the model makes of the rest is scored by

    .. math::
        \int_{t_{\min}}^1 \sigma'(t) \; \mathbb{E} \sum_{i \text{ masked}}
        \Big[ \sum_v s_{i,v} - \frac{\log s_{i,x_i}}{e^\sigma - 1} + K\Big(\frac{1}{e^\sigma - 1}
        \Big) \Big] dt, \qquad K(a) = a (\log a - 1)

    the diffusion-weighted denoising score entropy, with the scores of
    :func:`absorbing_log_scores`. Per masked token the integrand is

    .. math::
        \frac{\sigma'}{e^\sigma - 1} \big( -\log \mathrm{softmax}(z)_x + S - 1 - \log S \big),
        \qquad S = \frac1V \sum_v e^{z_v}

    **masked cross-entropy with a weight**, 1 / t with log-linear noise, where the scores are
    normalised (S = 1), and more by a penalty where they are not. Models whose head starts at 0
    start normalised.

    The loss, in nats per token, is an unbiased estimate of that integral plus
    :math:`e^{-\sigma(1)} \log V`, what the start of generation costs. It bounds the negative
    log-likelihood from above up to the few tokens that are masked before `t_min` (a share of
    `t_min` with log-linear noise), which :func:`likelihood_bound` adds.

    Source: Lou et al. 2024 (SEDD, arXiv 2310.16834), diffusion weighted denoising score entropy and
    the bound on the likelihood that it is. The text models of *Stabilizing Transformer Training
    Through Consensus* are trained with it (Appendix E.1).

    Args:
        mask_token: the token that stands for a gap; no other token of a text.
        noise: "log-linear" or "geometric", or a schedule with `total` and `rate`.
        noise_options: of a schedule by its name: ``{"eps": 1e-3}``, or ``{"sigma_min": 1e-4,
            "sigma_max": 20}``.
        t_min: the least time that is drawn (SEDD: 1e-3), in [0, 1). Earlier times hide hardly a
            token and weigh it much.
        low_discrepancy: draw the times of a batch evenly, from one random number: each is uniform,
            and together they vary less (Kingma et al. 2021, *Variational Diffusion Models*,
            Appendix I.1). False draws them independently, as SEDD does.

    A batch has ``tokens`` [*, N] and may have ``valid`` (padding, which loses nothing and is not
    counted), ``lengths`` [S] (several sequences packed along N, which have a time each), ``graph``,
    ``positions``, ``edge_features``, ``edge_bias`` and ``context`` for the model, and a
    ``structure`` for one that reads structures. A model that takes a
    ``noise_level`` gets sigma, one per sequence, or one per token of a packed batch. It gives
    logits [*, N, vocab_size]; that of the mask is not read.

    Raises:
        ValueError: names the argument, its value and what is allowed; in `loss`, for tokens that
            are masks already.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(
        ...     28, 32, depth=2, heads=4, noise_dim=16, zero_head=True)
        >>> objective = ga.train.AbsorbingDiffusion(mask_token=27)
        >>> batch = objective.collate([{"tokens": torch.randint(27, (n,))} for n in (50, 40)])
        >>> batch["tokens"].shape, batch["valid"].sum(-1)
        (torch.Size([2, 50]), tensor([50, 40]))
        >>> loss = objective.loss(model, batch)
        >>> loss.count
        90
        >>> loss.total.backward()
    """

    name = "diffusion"

    def __init__(
        self,
        mask_token: int,
        noise: str | Noise = "log-linear",
        *,
        noise_options: Mapping[str, Any] | None = None,
        t_min: float = 1e-3,
        low_discrepancy: bool = True,
    ) -> None:
        self.mask_token = as_int("mask_token", mask_token, 0)
        self.noise = as_noise(noise, noise_options)
        self.t_min = as_t_min(t_min)
        self.low_discrepancy = bool(low_discrepancy)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Sequences, with their structures and context, as one batch; the mask is their padding."""
        batch = collate_tokens(examples)
        if "valid" in batch:
            batch["tokens"] = batch["tokens"].masked_fill(~batch["valid"], self.mask_token)
        return batch

    def loss(self, model: Denoiser, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """The bound's estimate, summed over the tokens of a batch.

        ``sums`` has "masked", the masked tokens, and "normalization", the part of the loss that is
        no cross-entropy.
        """
        tokens, valid = batch["tokens"], batch.get("valid")
        check_no_masks(tokens, valid, self.mask_token)
        t = self.times(tokens, batch.get("lengths"), generator)
        share = self.noise.mask_probability(t if t.shape == tokens.shape else t.unsqueeze(-1))
        masked = torch.rand(tokens.shape, generator=generator, device=tokens.device) < share
        count = tokens.numel()
        if valid is not None:
            masked = masked & valid
            count = int(valid.expand(tokens.shape).sum())
        given = {name: batch.get(name) for name in FOR_THE_MODEL}
        if getattr(unwrapped(model), "structure", False) is not True:
            del given["structure"]  # others see the sequence alone
        elif given["structure"] is not None:
            del given["positions"]  # it has its own
        entropy, penalty, num_tokens = diffusion_losses(
            model, tokens, masked, t, self.mask_token, self.noise, **given
        )
        penalty_total = (1 - self.t_min) * penalty.sum()
        total = (1 - self.t_min) * entropy.sum() + penalty_total
        total = total + count * prior_loss(self.noise, num_tokens)
        sums = {"masked": float(masked.sum()), "normalization": float(penalty_total.detach())}
        return Loss(total, count, sums)

    def times(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Times in [t_min, 1], [*] for tokens [*, N]; of packed sequences one per token, [*, N]."""
        shape: tuple[int, ...] = tokens.shape[:-1]
        if lengths is not None:
            lengths = _lengths(lengths, tokens)
            shape = (*shape, len(lengths))
        count = math.prod(shape)
        if self.low_discrepancy:
            first = torch.rand((), generator=generator, device=tokens.device)
            u = torch.arange(count, device=tokens.device) / max(count, 1)
            u = ((u + first) % 1).view(shape)
        else:
            u = torch.rand(shape, generator=generator, device=tokens.device)
        t = 1 - (1 - self.t_min) * u  # in (t_min, 1]: never 0, where a weight may be infinite
        return t if lengths is None else t.repeat_interleave(lengths, dim=-1)

    def __repr__(self) -> str:
        return f"AbsorbingDiffusion(mask_token={self.mask_token}, noise={self.noise})"


def diffusion_losses(
    model: Denoiser,
    tokens: Tensor,
    masked: Tensor,
    t: Tensor,
    mask_token: int,
    noise: Noise,
    **given: Any,
) -> tuple[Tensor, Tensor, int]:
    """The integrand at given times and masks: cross-entropy and penalty, [*, N], with its weight.

    The third is V, how many tokens there are beside the mask.
    """
    if t.shape not in (tokens.shape[:-1], tokens.shape):
        raise ValueError(
            f"t must have shape {list(tokens.shape[:-1])} or {list(tokens.shape)}, "
            f"got {list(t.shape)}"
        )
    inputs = tokens.masked_fill(masked, mask_token)
    logits = call(model, inputs, noise.total(t), **given)
    entropy, penalty = score_entropy_parts(logits, tokens, masked, mask_token)
    weight = noise.weight(t).to(entropy.dtype)
    if weight.shape != tokens.shape:
        weight = weight.unsqueeze(-1)
    weight = torch.where(masked, weight, 0)
    num_tokens = logits.shape[-1] - (mask_token < logits.shape[-1])
    return weight * entropy, weight * penalty, num_tokens


def prior_loss(noise: Noise, num_tokens: int) -> float:
    r"""Return the cost of the start of generation per token, in nats: e^{-sigma(1)} log V.

    Generation is bounded as if it started from tokens that are masked with the probability of
    t = 1 and any of the V with even chances else; the divergence of a true token's noise from that.
    """
    return math.exp(-noise.range()[1]) * math.log(num_tokens)


def as_t_min(value: Any) -> float:
    """`t_min` in [0, 1)."""
    t_min = as_float("t_min", value, positive=False)
    if t_min >= 1:
        raise ValueError(f"t_min must be in [0, 1), got {t_min}")
    return t_min


def _lengths(lengths: Any, tokens: Tensor) -> Tensor:
    """Lengths of packed sequences, on the device of `tokens`."""
    lengths = torch.as_tensor(lengths, device=tokens.device)
    if lengths.dim() != 1 or lengths.is_floating_point() or int(lengths.sum()) != tokens.shape[-1]:
        raise ValueError(
            f"lengths must be integers [sequences] that sum to the {tokens.shape[-1]} tokens, "
            f"got {lengths.tolist()}"
        )
    return lengths
