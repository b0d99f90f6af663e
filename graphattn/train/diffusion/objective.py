"""Absorbing discrete diffusion as an objective: tokens are masked at all noise levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from graphattn.graphs.arguments import as_float, as_int
from graphattn.train.batches import collate_tokens, unwrapped
from graphattn.train.diffusion.calling import Denoiser, call
from graphattn.train.diffusion.noise import Noise, as_noise
from graphattn.train.diffusion.score_entropy import check_no_masks, score_entropy_parts
from graphattn.train.objectives.objective import Batch, Example, Loss, Objective, loss_of

FOR_THE_MODEL = ("graph", "valid", "positions", "edge_features", "edge_bias", "context", "tracks")


class AbsorbingDiffusion(Objective):
    r"""Absorbing discrete diffusion, trained by score entropy (SEDD).

    A time t is drawn for every sequence, every token is masked with probability :math:`1 -
    e^{-\sigma(t)}`, and the output of the model for the masked sequence is scored by

    .. math::
        \int_{t_{\min}}^1 \sigma'(t) \; \mathbb{E} \sum_{i \text{ masked}}
        \Big[ \sum_v s_{i,v} - \frac{\log s_{i,x_i}}{e^\sigma - 1} + K\Big(\frac{1}{e^\sigma - 1}
        \Big) \Big] dt, \qquad K(a) = a (\log a - 1)

    This is the diffusion-weighted denoising score entropy, with the scores of
    :func:`absorbing_log_scores`. Per masked token the integrand is

    .. math::
        \frac{\sigma'}{e^\sigma - 1} \big( -\log \mathrm{softmax}(z)_x + S - 1 - \log S \big),
        \qquad S = \frac1V \sum_v e^{z_v}

    If the scores are normalised (S = 1), this is **masked cross-entropy with a weight**, 1 / t with
    log-linear noise. Otherwise there is an additional penalty. Models whose head starts at 0 start
    with normalised scores.

    The loss, in nats per token, is an unbiased estimate of that integral plus :math:`e^{-\sigma(1)}
    \log V`, the cost of the start of generation. It is an upper bound on the negative
    log-likelihood, except for the few tokens that are masked before `t_min` (a share of `t_min`
    with log-linear noise); :func:`likelihood_bound` adds these.

    Source: Lou et al. 2024 (SEDD, arXiv 2310.16834), diffusion weighted denoising score entropy and
    its bound on the likelihood. The text models of *Stabilizing Transformer Training Through
    Consensus* are trained with it (Appendix E.1).

    Args:
        mask_token: the token of a masked position; texts must not contain it.
        noise: "log-linear" or "geometric", or a schedule with `total` and `rate`.
        noise_options: options of a schedule given by name: ``{"eps": 1e-3}``, or ``{"sigma_min":
            1e-4, "sigma_max": 20}``.
        t_min: the smallest time that is drawn, in [0, 1) (1e-3 in SEDD). Smaller times mask almost
            no token, but give it a large weight.
        low_discrepancy: draw evenly spaced times for a batch from one random number: each is
            uniform, and their mean varies less (Kingma et al. 2021, *Variational Diffusion Models*,
            Appendix I.1). False draws them independently, as SEDD does.

    A batch has ``tokens`` [*, N] and may have ``valid`` (False for padding, which is not counted),
    ``lengths`` [S] (for several sequences packed along N, each with its own time), ``graph``,
    ``positions``, ``edge_features``, ``edge_bias`` and ``context`` for the model, and a
    ``structure`` for one that reads structures. A model that takes a ``noise_level`` gets sigma,
    one per sequence, or one per token of a packed batch. It must return logits [*, N, vocab_size];
    the logit of the mask is not read.

    Raises:
        ValueError: if an argument is not allowed; in `loss`, also if a token is already the mask.

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
        """Join sequences into one batch, padded with the mask, with structures and context."""
        batch = collate_tokens(examples)
        if "valid" in batch:
            batch["tokens"] = batch["tokens"].masked_fill(~batch["valid"], self.mask_token)
        return batch

    def loss(self, model: Denoiser, batch: Batch, generator: Generator | None = None) -> Loss:
        """Estimate the bound, summed over the tokens of a batch.

        ``sums`` contains "masked", the number of masked tokens, and "normalization", the part of
        the loss that is not cross-entropy.
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
        structure = batch.get("structure")
        if structure is not None and getattr(unwrapped(model), "structure", False) is True:
            given |= {"structure": structure, "positions": None}  # it has its own positions
        entropy, penalty, num_tokens = diffusion_losses(
            model, tokens, masked, t, self.mask_token, self.noise, **given
        )
        normalization = (1 - self.t_min) * float(penalty.detach().sum())
        sums = {"masked": float(masked.sum()), "normalization": normalization}
        loss = loss_of((1 - self.t_min) * (entropy + penalty), count, sums)
        prior = prior_loss(self.noise, num_tokens)  # of every token
        if loss.squares is not None:
            loss.squares += 2 * prior * loss.total.detach() + count * prior**2
        loss.total = loss.total + count * prior
        return loss

    def times(
        self, tokens: Tensor, lengths: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Draw times in [t_min, 1]: [*] for tokens [*, N], or [*, N] for packed sequences."""
        shape: tuple[int, ...] = tokens.shape[:-1]
        if lengths is not None:
            lengths, N = torch.as_tensor(lengths, device=tokens.device), tokens.shape[-1]
            if lengths.dim() != 1 or lengths.is_floating_point() or int(lengths.sum()) != N:
                raise ValueError(
                    f"lengths must be integers [sequences] that sum to the {N} tokens, got "
                    f"{lengths.tolist()}"
                )
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
    """Return the integrand at given times and masks: weighted cross-entropy and penalty, [*, N].

    The third result is V, the number of tokens without the mask.
    """
    if t.shape not in (tokens.shape[:-1], tokens.shape):
        raise ValueError(
            f"t must have shape {list(tokens.shape[:-1])} (one per sequence) or "
            f"{list(tokens.shape)} (one per token), got {list(t.shape)}"
        )
    logits = call(model, tokens.masked_fill(masked, mask_token), noise.total(t), **given)
    entropy, penalty = score_entropy_parts(logits, tokens, masked, mask_token)
    weight = noise.weight(t).to(entropy.dtype)
    if weight.shape != tokens.shape:
        weight = weight.unsqueeze(-1)
    weight = torch.where(masked, weight, 0)
    num_tokens = logits.shape[-1] - (mask_token < logits.shape[-1])
    return weight * entropy, weight * penalty, num_tokens


def prior_loss(noise: Noise, num_tokens: int) -> float:
    r"""Return the cost of the start of generation per token, in nats: e^{-sigma(1)} log V.

    The bound assumes that generation starts from tokens that are masked with the probability at t =
    1, and otherwise are one of the V tokens with equal probability. The cost is the divergence
    between the noise of a true token at t = 1 and that distribution.
    """
    return math.exp(-noise.range()[1]) * math.log(num_tokens)


def as_t_min(value: Any) -> float:
    """Check that `t_min` is in [0, 1)."""
    t_min = as_float("t_min", value, positive=False)
    if t_min >= 1:
        raise ValueError(f"t_min must be in [0, 1), got {t_min}")
    return t_min
