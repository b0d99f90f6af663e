"""Text from a model of masked diffusion: masks become tokens, in few steps or one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.language.sampling import Sampling, draw
from graphattn.ops.inputs import check_valid, full_precision
from graphattn.train.diffusion.calling import (
    Denoiser,
    call,
    check_generator,
    device_of,
    without_dropout,
)
from graphattn.train.diffusion.noise import Noise, as_noise
from graphattn.train.diffusion.score_entropy import without_mask

Method = Literal["ancestral", "tweedie", "top-probability"]
METHODS = ("ancestral", "tweedie", "top-probability")


@torch.no_grad()
def sample_diffusion(
    model: Denoiser,
    shape: int | Sequence[int],
    steps: int | None = None,
    *,
    mask_token: int,
    method: Method = "ancestral",
    noise: str | Noise = "log-linear",
    temperature: float = 1.0,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    prompt: Tensor | None = None,
    valid: Tensor | None = None,
    progress: Callable[[int, Tensor], Any] | None = None,
    device: torch.device | str | None = None,
    **given: Any,
) -> Tensor:
    r"""Draw sequences from a model of absorbing diffusion, starting from masks alone.

    - ``"ancestral"`` goes back in time in `steps` equal steps. In each, a masked token is unmasked
      with probability :math:`(m(t) - m(s)) / m(t)`, m being the schedule's share of masks at the
      times t > s, and drawn from the model's softmax. With a model that gives the exact
      :math:`p(x_i \mid \text{unmasked})`, sequences are exact as `steps` grows: tokens that are
      unmasked in the same step are drawn independently of each other.
    - ``"tweedie"`` is SEDD's analytic sampler (Tweedie tau-leaping): the same, but that probability
      is multiplied by the sum S of what the scores say, at most 1. The last step unmasks all.
      For normalised scores it is "ancestral".
    - ``"top-probability"`` unmasks in every step the places whose likeliest token is likeliest, and
      draws a token for each from the model's softmax. One at a time if `steps` is None, as the
      consensus paper generates text (Appendix E.1), else evenly many per step. That is not the
      model's distribution: sure places come first.

    Source: Lou et al. 2024 (SEDD), simulation of the reverse process; Kim et al. 2025, *Train for
    the Worst, Plan for the Best* ("top probability").

    Args:
        model: logits [*, N, vocab_size] from tokens [*, N]; called with ``noise_level`` [*] where
            it takes one, as :class:`~graphattn.models.SequenceEncoder` with ``noise_dim`` does.
            Dropout is off. Logits of the mask are not read.
        shape: of the tokens, such as (batch, N), or N.
        steps: calls of the model at most; as many as tokens if None.
        mask_token: the token that stands for a gap.
        method: "ancestral", "tweedie" or "top-probability".
        noise: the schedule of the training.
        temperature: logits are divided by it before a token is drawn; 0 takes the likeliest. Which
            places are unmasked does not depend on it.
        top_p: draw from the fewest likeliest tokens that together have this probability; all if
            None.
        generator: draws places and tokens; torch's own if None.
        prompt: tokens [*, n] or [n], n <= N, at the first places; masks among them are gaps to
            fill, and all others stay as they are.
        valid: bool [N] or [*, N]; padding (False) is not written, and given to the model.
        progress: called as ``progress(step, tokens)`` after every step with a copy of the tokens,
            masks included; sampling ends where it returns True.
        device: of the tokens; the model's, the prompt's or the generator's if None.
        given: further arguments of the model, such as a graph.

    Returns:
        Integers of `shape`; padding is `mask_token`.

    Raises:
        ValueError: names the argument, its value and what is allowed; where the model gives NaN.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(28, 32, depth=2, heads=4, noise_dim=16)
        >>> draws = torch.Generator().manual_seed(0)
        >>> text = ga.train.sample_diffusion(model, (2, 20), 10, mask_token=27, generator=draws)
        >>> text.shape, bool((text == 27).any())
        (torch.Size([2, 20]), False)

        Filling gaps, one token at a time, surest first:

        >>> gaps = torch.tensor([3, 1, 27, 27, 5])
        >>> filled = ga.train.sample_diffusion(
        ...     model, 5, mask_token=27, prompt=gaps, method="top-probability")
        >>> filled[[0, 1, 4]]
        tensor([3, 1, 5])
    """
    shape = _shape(shape)
    mask_token = as_int("mask_token", mask_token, 0)
    steps = shape[-1] if steps is None else as_int("steps", steps, 1)
    as_choice("method", method, METHODS)
    schedule = as_noise(noise)
    sampling = Sampling.checked(temperature, None, top_p)
    check_generator(generator)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be callable or None, got {progress!r}")
    device = torch.device(device or device_of(model, prompt, generator))
    tokens = _start(shape, mask_token, prompt, device)
    if valid is not None:
        check_valid(valid, tokens.shape[:-1], device, shape[-1], shape[-1])
        tokens = tokens.masked_fill(~valid, mask_token)
    gaps = tokens == mask_token
    gaps = gaps if valid is None else gaps & valid

    def logits(now: Tensor, noise_level: Tensor) -> Tensor:
        return call(model, now.clone(), noise_level, valid=valid, **given)

    with without_dropout(model):  # (A walk sees what is written into tokens and gaps.)
        if method == "top-probability":
            walk = _surest_first(logits, tokens, gaps, valid, steps, mask_token, schedule)
        else:
            walk = _back_in_time(
                logits, tokens, gaps, steps, mask_token, schedule, generator, method == "tweedie"
            )
        for step, places, guesses in walk:
            if guesses is not None:
                chosen = (
                    sampling.choose(guesses, generator)
                    if sampling.is_greedy
                    else draw(sampling.probabilities(guesses.double()), generator)
                )  # float32's coarse random numbers would favour the likely: Zheng et al. 2024
                tokens[places] = chosen
                gaps &= ~places
            if progress is not None and progress(step, tokens.clone()):
                break
    return tokens


def _back_in_time(
    logits: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    gaps: Tensor,
    steps: int,
    mask_token: int,
    noise: Noise,
    generator: torch.Generator | None,
    with_sums: bool,
) -> Any:
    """Per step its number, the places to unmask, and logits [places, vocab_size] for them.

    The model is not called in a step that unmasks nothing.
    """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    shares = noise.mask_probability(times).tolist()
    shares[0], shares[-1] = 1.0, 0.0  # all is masked at first, and nothing in the end
    levels = noise.total(times).tolist()
    for step in range(steps):
        leaves = (shares[step] - shares[step + 1]) / shares[step]
        u = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        is_last = step == steps - 1
        places = gaps & (u < leaves) if not with_sums or is_last else gaps
        if not bool(places.any()):
            yield step + 1, places, None
            continue
        level = torch.full(tokens.shape[:-1], levels[step], device=tokens.device)
        guesses, num_tokens = _guesses(logits(tokens, level), places, mask_token)
        if with_sums and not is_last:
            sums = (guesses.logsumexp(-1) - math.log(num_tokens)).exp()
            keep = u[places] < leaves * sums
            places = places.masked_scatter(places, keep)
            guesses = guesses[keep]
        yield step + 1, places, guesses


def _surest_first(
    logits: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    gaps: Tensor,
    valid: Tensor | None,
    steps: int,
    mask_token: int,
    noise: Noise,
) -> Any:
    """Unmask the surest tokens first, with the arguments of :func:`_back_in_time`; the noise level
    is that of the share of tokens that are masked.
    """
    least, most = noise.range()
    real = torch.ones_like(gaps) if valid is None else valid.expand(gaps.shape)
    steps = min(steps, int(gaps.sum(-1).max()) if gaps.numel() else 0)
    for step in range(steps):
        left = gaps.sum(-1)
        share = left.double() / real.sum(-1).clamp_min(1)
        level = (-torch.log1p(-share)).clamp(least, most).float()
        guesses, _ = _guesses(logits(tokens, level), gaps, mask_token)
        certainty = guesses.max(-1).values - guesses.logsumexp(-1)
        of_place = torch.full(gaps.shape, -torch.inf, device=gaps.device, dtype=certainty.dtype)
        of_place = of_place.masked_scatter(gaps, certainty)
        rank = of_place.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        count = -(-left // (steps - step))  # the rest, evenly over the steps that are left
        places = gaps & (rank < count.unsqueeze(-1))
        yield step + 1, places, guesses[places[gaps]]


def _guesses(logits: Tensor, places: Tensor, mask_token: int) -> tuple[Tensor, int]:
    """Logits [places, vocab_size] with -inf for the mask, and how many other tokens there are."""
    with full_precision(logits.device):
        found, num_tokens = without_mask(logits[places], mask_token)
        if not bool(found.logsumexp(-1).isfinite().all()):
            raise ValueError("model must give finite logits for masked tokens, got NaN or infinity")
    return found, num_tokens


def _shape(shape: Any) -> tuple[int, ...]:
    entries = shape if isinstance(shape, tuple | list) else [shape]
    found = tuple(as_int("shape", size, 0) for size in entries)
    if not found or found[-1] == 0:
        raise ValueError(f"shape must be (*, N) with N >= 1, got {shape!r}")
    return found


def _start(shape: tuple[int, ...], mask_token: int, prompt: Any, device: torch.device) -> Tensor:
    """Masks of `shape`, behind or around what is given."""
    tokens = torch.full(shape, mask_token, device=device)
    if prompt is None:
        return tokens
    if not isinstance(prompt, Tensor) or prompt.dtype not in (torch.int32, torch.int64):
        got = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise ValueError(f"prompt must be an int32 or int64 tensor, got {got}")
    n = prompt.shape[-1] if prompt.dim() else 0
    try:
        if not 0 < n <= shape[-1]:
            raise RuntimeError
        tokens[..., :n] = prompt.to(device).expand(*shape[:-1], n)
    except RuntimeError:
        raise ValueError(
            f"prompt must have shape [*, n] with n <= {shape[-1]} and * that of shape "
            f"{list(shape)}, or [n], got {list(prompt.shape)}"
        ) from None
    return tokens
