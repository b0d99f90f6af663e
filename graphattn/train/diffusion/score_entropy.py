"""Score entropy: a loss for estimates of ratios of probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.ops.inputs import compute_dtype, full_precision
from graphattn.train.checks import check_masked_logits, check_range, described


def score_entropy(log_scores: Tensor, ratios: Tensor) -> Tensor:
    r"""Return the loss of scores s when the true ratios of probabilities are r, elementwise.

    .. math::
        s - r \log s + r (\log r - 1) \;\ge\; 0,

    which is 0 exactly at s = r and convex in log s. Its gradient with respect to log s is s - r.

    Source: Lou et al. 2024 (SEDD), Definition 3.1 (without the weights and the sum).

    Args:
        log_scores: log s, floating-point [*].
        ratios: r >= 0, broadcastable to `log_scores`.

    Returns:
        The loss, [*], at least in float32.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.train.score_entropy(torch.tensor([0.0, 1.0]).log(), torch.tensor([0.0, 1.0]))
        tensor([0., 0.])
    """
    if not isinstance(log_scores, Tensor) or not log_scores.is_floating_point():
        raise ValueError(f"log_scores must be a floating-point tensor, got {described(log_scores)}")
    with full_precision(log_scores.device):
        log_scores = log_scores.to(compute_dtype(log_scores.dtype))
        ratios = ratios.to(log_scores.dtype)
        crossed = torch.where(ratios > 0, ratios * log_scores, 0)  # 0 log 0 = 0
        return log_scores.exp() - crossed + torch.special.xlogy(ratios, ratios) - ratios


def absorbing_log_scores(logits: Tensor, noise_level: Tensor, mask_token: int) -> Tensor:
    r"""Convert a model's logits to log-scores of the absorbing process.

    .. math::
        \log s_v = z_v - \log V - \log(e^\sigma - 1)

    for each of the V tokens. The mask itself has no score (log s is -inf). The exact score of a
    masked position is :math:`p(v \mid \text{what is not masked}) / (e^\sigma - 1)`, so
    :math:`e^{z_v} / V` is the model's probability, and logits of 0 mean equal probabilities.

    Source: Lou et al. 2024 (SEDD), the absorbing case and its scaled scores.

    Args:
        logits: z, [*, vocab_size].
        noise_level: sigma > 0, broadcastable to the leading dimensions of `logits`.
        mask_token: the absorbing token; if it is not below vocab_size, the logits have no column
            for it.

    Returns:
        [*, vocab_size], at least in float32.

    Example:
        >>> import torch, graphattn as ga
        >>> at = torch.tensor(2.0).log()  # half of the tokens are masked
        >>> ga.train.absorbing_log_scores(torch.zeros(3), at, mask_token=2).exp()
        tensor([0.5000, 0.5000, 0.0000])
    """
    with full_precision(logits.device):
        logits, num_tokens = without_mask(logits, as_int("mask_token", mask_token, 0))
        sigma = noise_level.to(logits.dtype).unsqueeze(-1)
        # This form does not overflow for any sigma.
        log_expm1 = sigma + torch.log(-torch.expm1(-sigma))
        return logits - math.log(num_tokens) - log_expm1


def denoising_score_entropy(
    logits: Tensor, tokens: Tensor, masked: Tensor, noise_level: Tensor, mask_token: int
) -> Tensor:
    r"""Return the denoising score entropy of every token, in the absorbing process.

    With the true ratio :math:`1 / (e^\sigma - 1)` at the token :math:`x` that was masked, and 0 at
    all others, the sum over v of :func:`score_entropy` is

    .. math::
        \frac{1}{e^\sigma - 1} \big( -\log \mathrm{softmax}(z)_x + S - 1 - \log S \big), \qquad
        S = \frac1V \sum_v e^{z_v}

    and it is computed in this form: the cross-entropy of masked-token modelling, and a penalty that
        is 0 if S = 1, that is, if the scores have the right sum.

    Source: Lou et al. 2024 (SEDD), denoising score entropy.

    Args:
        logits: z, [*, N, vocab_size], as in :func:`absorbing_log_scores`.
        tokens: the tokens before they were masked, integers [*, N].
        masked: bool [*, N]; the result is 0 for other tokens.
        noise_level: sigma > 0, [*] or [*, N].
        mask_token: the absorbing token.

    Returns:
        [*, N] >= 0, at least in float32; multiply by d sigma / dt for the bound's integrand.

    Raises:
        ValueError: if the shapes do not fit, or a masked token is not in the vocabulary.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens, masked = torch.tensor([0, 1]), torch.tensor([True, False])
        >>> ga.train.denoising_score_entropy(  # log 2, times 1 / (2 - 1)
        ...     torch.zeros(2, 3), tokens, masked, torch.tensor(2.0).log(), mask_token=2)
        tensor([0.6931, 0.0000])
    """
    entropy, penalty = score_entropy_parts(logits, tokens, masked, mask_token)
    sigma = noise_level.to(entropy.dtype)
    if sigma.dim() < entropy.dim():
        sigma = sigma.unsqueeze(-1)
    return torch.where(masked, (entropy + penalty) / torch.expm1(sigma), 0)


def score_entropy_parts(
    logits: Any, tokens: Tensor, masked: Tensor, mask_token: int
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and penalty of :func:`denoising_score_entropy`, [*, N]; 0 if unmasked.

    Their sum is the denoising score entropy times (exp(sigma) - 1).
    """
    mask_token = as_int("mask_token", mask_token, 0)
    check_masked_logits(logits, tokens, masked)
    with full_precision(logits.device):
        truth = tokens[masked].long()
        check_range(truth, logits.shape[-1])
        check_no_masks(truth, None, mask_token)
        guessed, num_tokens = without_mask(logits[masked], mask_token)
        log_sum = guessed.logsumexp(-1)
        entropy = log_sum - guessed.gather(-1, truth.unsqueeze(-1)).squeeze(-1)
        log_s = log_sum - math.log(num_tokens)
        penalty = torch.expm1(log_s) - log_s
        nothing = guessed.new_zeros(tokens.shape)
        return nothing.masked_scatter(masked, entropy), nothing.masked_scatter(masked, penalty)


def without_mask(logits: Tensor, mask_token: int) -> tuple[Tensor, int]:
    """Return logits with -inf for the mask, at least in float32, and the number of other tokens."""
    logits = logits.to(compute_dtype(logits.dtype))
    if mask_token >= logits.shape[-1]:
        return logits, logits.shape[-1]
    if logits.shape[-1] < 2:
        raise ValueError(
            f"logits must have at least one token besides the mask, got {list(logits.shape)} "
            "(vocab_size 1)"
        )
    place = torch.arange(logits.shape[-1], device=logits.device) == mask_token
    return logits.masked_fill(place, -torch.inf), logits.shape[-1] - 1


def check_no_masks(tokens: Tensor, valid: Tensor | None, mask_token: int) -> None:
    """Raise a ValueError if a token is already the mask, if reading values is cheap."""
    if tokens.device.type != "cpu":
        return
    is_mask = tokens == mask_token
    if bool((is_mask if valid is None else is_mask & valid).any()):
        raise ValueError(
            f"tokens must not contain mask_token, {mask_token}, which is only for masked positions"
        )
