"""Sample from a masked diffusion model: masks become tokens, several per step or one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.language.sampling import Sampling, draw
from graphattn.ops.inputs import check_valid, full_precision
from graphattn.train.batches import device_of
from graphattn.train.checks import described
from graphattn.train.diffusion.calling import (
    Denoiser,
    call,
    check_generator,
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
    generator: Generator | None = None,
    prompt: Tensor | None = None,
    valid: Tensor | None = None,
    progress: Callable[[int, Tensor], Any] | None = None,
    device: torch.device | str | None = None,
    **given: Any,
) -> Tensor:
    r"""Draw sequences from a model of absorbing diffusion, starting from masks.

    - ``"ancestral"`` goes back in time in `steps` equal steps. In a step from time t to s < t, a
      masked token is unmasked with probability :math:`(m(t) - m(s)) / m(t)`, where m is the share
      of masks in the schedule, and drawn from the model's softmax. Tokens that are unmasked in the
      same step are drawn independently. If the model is exact, :math:`p(x_i \mid \text{unmasked})`,
      the distribution of sequences becomes exact as `steps` grows.
    - ``"tweedie"`` is SEDD's analytic sampler (Tweedie tau-leaping): the same, but that probability
      is multiplied by S, the sum of the scores, at most to 1. The last step unmasks all tokens. For
      normalised scores (S = 1) it equals "ancestral".
    - ``"top-probability"`` unmasks in every step the positions where the largest probability of a
      token is highest, and draws a token for each from the model's softmax. If `steps` is None, it
      unmasks one position per step, as the consensus paper does for text (Appendix E.1); otherwise
      equally many in each step. The result does not follow the model's distribution, because the
      most certain positions come first.

    Source: Lou et al. 2024 (SEDD), simulation of the reverse process; Kim et al. 2025, *Train for
    the Worst, Plan for the Best* ("top probability").

    Args:
        model: logits [*, N, vocab_size] from tokens [*, N]; called with ``noise_level`` [*] if it
            takes one, as :class:`~graphattn.models.SequenceEncoder` with ``noise_dim`` does.
            Dropout is off. Logits of the mask are not read.
        shape: shape of the tokens, such as (batch, N), or N.
        steps: maximal number of calls of the model; None for one per token.
        mask_token: the token of a masked position.
        method: "ancestral", "tweedie" or "top-probability".
        noise: the noise schedule of the training.
        temperature: logits are divided by it before a token is drawn; with 0 the most likely token
            is taken. It does not change which positions are unmasked.
        top_p: draw from the smallest set of most likely tokens that together have this probability;
            None for all.
        generator: random generator for positions and tokens; None for torch's default.
        prompt: tokens [*, n] or [n] for the first n <= N positions. Masks among them are filled;
            the others do not change.
        valid: bool [N] or [*, N]; padding (False) is not filled; the model also gets this mask.
        progress: called as ``progress(step, tokens)`` after every step with a copy of the tokens,
            including masks; sampling ends if it returns True.
        device: device of the tokens; None for that of the model, the prompt or the generator.
        given: further arguments of the model, such as a graph.

    Returns:
        Integers of `shape`; padding is `mask_token`.

    Raises:
        ValueError: if an argument is not allowed (the message names it and says what is allowed),
            or if the model returns NaN.

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

    # The iterator `walk` reads `tokens` and `gaps`, which the loop below changes.
    with without_dropout(model):
        if method == "top-probability":
            walk = _surest_first(logits, tokens, gaps, valid, steps, mask_token, schedule)
        else:
            walk = _back_in_time(
                logits, tokens, gaps, steps, mask_token, schedule, generator, method == "tweedie"
            )
        for step, places, guesses in walk:
            if guesses is not None:
                if sampling.is_greedy:
                    tokens[places] = sampling.choose(guesses, generator)
                else:  # float32 would draw likely tokens too often (Zheng et al. 2024)
                    shares = sampling.probabilities(guesses.double())
                    tokens[places] = draw(shares, generator)
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
    generator: Generator | None,
    with_sums: bool,
) -> Any:
    """Yield for each step its number, the positions to unmask, and their logits [n, vocab_size].

    A step that unmasks nothing does not call the model.
    """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    shares = noise.mask_probability(times).tolist()
    shares[0], shares[-1] = 1.0, 0.0  # everything is masked at the start, nothing at the end
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
    """Unmask the most certain tokens first; arguments are those of :func:`_back_in_time`.

    The noise level follows from the share of tokens that are masked.
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
        # Spread the remaining tokens evenly over the remaining steps.
        count = -(-left // (steps - step))
        places = gaps & (rank < count.unsqueeze(-1))
        yield step + 1, places, guesses[places[gaps]]


def _guesses(logits: Tensor, places: Tensor, mask_token: int) -> tuple[Tensor, int]:
    """Return logits [n, vocab_size] with -inf for the mask, and the number of other tokens."""
    with full_precision(logits.device):
        guesses, num_tokens = without_mask(logits[places], mask_token)
        if not bool(guesses.logsumexp(-1).isfinite().all()):
            raise ValueError(
                "model must return finite logits for masked tokens, got NaN or infinity"
            )
    return guesses, num_tokens


def _shape(shape: Any) -> tuple[int, ...]:
    entries = shape if isinstance(shape, tuple | list) else [shape]
    sizes = tuple(as_int("shape", size, 0) for size in entries)
    if not sizes or sizes[-1] == 0:
        raise ValueError(f"shape must be a tuple (*, N), or N, with N >= 1, got {shape!r}")
    return sizes


def _start(shape: tuple[int, ...], mask_token: int, prompt: Any, device: torch.device) -> Tensor:
    """Make masks of `shape`, with the prompt at the first positions."""
    tokens = torch.full(shape, mask_token, device=device)
    if prompt is None:
        return tokens
    if not isinstance(prompt, Tensor) or prompt.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"prompt must be an int32 or int64 tensor, got {described(prompt)}")
    n = prompt.shape[-1] if prompt.dim() else 0
    try:
        if not 0 < n <= shape[-1]:
            raise RuntimeError
        tokens[..., :n] = prompt.to(device).expand(*shape[:-1], n)
    except RuntimeError:
        raise ValueError(
            f"prompt must have shape [n] or [*, n] with n in 1 .. {shape[-1]} and the leading "
            f"dimensions of shape {list(shape)}, got {list(prompt.shape)}"
        ) from None
    return tokens
