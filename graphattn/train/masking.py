"""Masked-token modelling: hide tokens, and score the guesses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.arguments import as_float, as_int
from graphattn.ops.inputs import compute_dtype


def mask_tokens(
    tokens: Tensor,
    mask_token: int,
    *,
    mask_ratio: float = 0.15,
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens of which a random share is replaced by `mask_token`, and which ones those are.

    Every token is masked independently with probability `mask_ratio` (BERT, Devlin et al. 2019,
    without its random and unchanged tenths).

    Args:
        tokens: integers of any shape.
        mask_token: the token that stands for "guess this one", often the last of the vocabulary.
        mask_ratio: in (0, 1].
        valid: bool, broadcastable to `tokens`; padding (False) is never masked.
        generator: source of the random numbers.

    Returns:
        (inputs, masked): `tokens` with mask tokens in place, and a bool tensor of their shape.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.arange(8)
        >>> inputs, masked = ga.train.mask_tokens(
        ...     tokens, mask_token=9, mask_ratio=0.5, generator=torch.Generator().manual_seed(0))
        >>> inputs
        tensor([9, 1, 9, 9, 9, 5, 9, 7])
        >>> bool((inputs[~masked] == tokens[~masked]).all())
        True
    """
    _check_tokens(tokens)
    mask_token = as_int("mask_token", mask_token, 0)
    if mask_token > torch.iinfo(tokens.dtype).max:
        raise ValueError(f"mask_token must be a number of {tokens.dtype}, got {mask_token}")
    if as_float("mask_ratio", mask_ratio, positive=True) > 1:
        raise ValueError(f"mask_ratio must be in (0, 1], got {mask_ratio}")
    masked = torch.rand(tokens.shape, generator=generator, device=tokens.device) < mask_ratio
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
            got = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
            raise ValueError(f"valid must be a bool tensor, got {got}")
        try:
            masked &= valid
        except RuntimeError:
            raise ValueError(
                f"valid must be broadcastable to tokens {list(tokens.shape)}, "
                f"got {list(valid.shape)}"
            ) from None
    return tokens.masked_fill(masked, mask_token), masked


def masked_token_loss(logits: Tensor, tokens: Tensor, masked: Tensor) -> Tensor:
    """Mean cross-entropy of the masked tokens, in nats per token.

    Args:
        logits: [*, vocab_size].
        tokens: the original tokens, integers [*].
        masked: bool [*], from :func:`mask_tokens`.

    Returns:
        A scalar; 0 (with zero gradients) where nothing is masked.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.tensor([1, 0, 2])
        >>> logits = torch.zeros(3, 4)  # every token equally likely: log 4
        >>> ga.train.masked_token_loss(logits, tokens, torch.tensor([True, False, True]))
        tensor(1.3863)
    """
    _check_tokens(tokens)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be a floating-point tensor [*, vocab_size], got {got}")
    if not isinstance(masked, Tensor) or masked.dtype != torch.bool:
        got = masked.dtype if isinstance(masked, Tensor) else type(masked).__name__
        raise ValueError(f"masked must be a bool tensor, got {got}")
    if logits.shape[:-1] != tokens.shape or masked.shape != tokens.shape:
        raise ValueError(
            "logits, tokens and masked must have shapes [*, vocab_size], [*] and [*], "
            f"got {list(logits.shape)}, {list(tokens.shape)} and {list(masked.shape)}"
        )
    guessed, truth = (
        logits[masked].to(compute_dtype(logits.dtype)),
        tokens[masked].long(),
    )  # half precision would overflow
    if truth.device.type == "cpu" and truth.numel() > 0:
        least, most = (int(t) for t in truth.aminmax())
        if least < 0 or most >= logits.shape[-1]:
            raise ValueError(
                f"tokens must be 0 .. {logits.shape[-1] - 1} where masked, "
                f"got {least if least < 0 else most}"
            )
    total = functional.cross_entropy(guessed, truth, reduction="sum")
    return total / masked.sum().clamp_min(1)


def _check_tokens(tokens: object) -> None:
    is_integer = isinstance(tokens, Tensor) and not (
        tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    )
    if not is_integer:
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be an integer tensor, got {got}")
