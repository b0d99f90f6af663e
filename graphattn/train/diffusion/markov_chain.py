"""Markov chains: sequences with known probabilities and a known exact denoiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from graphattn.models.language.sampling import draw
from graphattn.train.checks import check_range, described


class MarkovChain:
    r"""A Markov chain of tokens with exact probabilities, for comparison with models.

    It can be called like a model. In the tokens of a call, V = ``len(transition)`` (or any larger
    number) is a mask. The result are logits of the exact distribution of each token, given all
    other tokens that are not masked,

    .. math::
        z_v = \log p(x_i = v \mid x_j, j \ne i \text{ not masked}) + \log V,

    computed by the forward-backward recursion. They are the exact scores of absorbing diffusion
    (:func:`absorbing_log_scores`), so the chain can be sampled and evaluated like a model.

    Args:
        transition: floating-point [V, V], rows sum to 1: entry [a, b] is the probability that b
            follows a.
        initial: distribution of the first token, [V]; the stationary distribution if None.

    Raises:
        ValueError: if an argument does not contain probabilities, or the shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> chain = ga.train.MarkovChain(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> chain.initial
        tensor([0.6667, 0.3333])
        >>> chain.log_probability(torch.tensor([0, 0, 1])).exp()
        tensor(0.0600)
        >>> (chain(torch.tensor([0, 2, 0])).exp() / 2)[1]  # 0.9 * 0.9 to 0.1 * 0.2
        tensor([0.9759, 0.0241])
    """

    def __init__(self, transition: Tensor, initial: Tensor | None = None) -> None:
        self.transition = _probabilities("transition", transition, 2)
        self.num_tokens = len(transition)
        if initial is None:
            initial = _stationary(self.transition)
        self.initial = _probabilities("initial", initial, 1).to(self.transition)
        if self.transition.shape[1] != self.num_tokens or len(self.initial) != self.num_tokens:
            raise ValueError(
                "transition and initial must have shapes [V, V] and [V], got "
                f"{list(self.transition.shape)} and {list(self.initial.shape)}"
            )

    def sample(self, shape: Sequence[int], generator: Generator | None = None) -> Tensor:
        """Draw sequences of a shape such as (batch, N)."""
        *batch, length = shape
        tokens = [draw(self.initial.expand(*batch, -1), generator)]
        for _ in range(length - 1):
            tokens.append(draw(self.transition[tokens[-1]], generator))
        return torch.stack(tokens, -1)

    def log_probability(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of whole sequences, [*], from tokens [*, N]."""
        check_range(tokens, self.num_tokens)
        steps = self.transition[tokens[..., :-1], tokens[..., 1:]]
        return self.initial[tokens[..., 0]].log() + steps.log().sum(-1)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits of the exact denoiser, [*, N, V]; NaN if unmasked tokens are impossible."""
        known = torch.nn.functional.one_hot(tokens.clamp(0, self.num_tokens), self.num_tokens + 1)
        is_gap = known[..., -1:].to(self.transition)
        evidence = (known[..., :-1].to(self.transition) + is_gap).unbind(-2)
        before = [self.initial.expand(evidence[0].shape)]
        for seen in evidence[:-1]:
            message = (before[-1] * seen) @ self.transition
            before.append(message / message.sum(-1, keepdim=True))
        after = [torch.ones_like(evidence[0])]
        for seen in reversed(evidence[1:]):
            message = (after[-1] * seen) @ self.transition.T
            after.append(message / message.sum(-1, keepdim=True))
        joint = torch.stack(before, -2) * torch.stack(after[::-1], -2)
        return (joint / joint.sum(-1, keepdim=True)).log() + math.log(self.num_tokens)

    def __repr__(self) -> str:
        return f"MarkovChain({self.num_tokens} tokens)"


def _stationary(transition: Tensor) -> Tensor:
    """Return pi with pi P = pi and sum 1, by least squares."""
    V = len(transition)
    system = torch.cat([transition.T.double().cpu() - torch.eye(V), torch.ones(1, V)])
    right = torch.cat([torch.zeros(V), torch.ones(1)]).double().unsqueeze(-1)
    share = torch.linalg.lstsq(system, right, driver="gelsd").solution.squeeze(-1).clamp_min(0)
    return (share / share.sum()).to(transition.dtype)


def _probabilities(name: str, values: Any, dim: int) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() != dim:
        raise ValueError(
            f"{name} must be a floating-point tensor of {dim} dimensions, got {described(values)}"
        )
    off = (values.sum(-1) - 1).abs().max()
    if bool((values < 0).any()) or not off < 1e-4:
        raise ValueError(f"{name} must contain probabilities whose rows sum to 1, got {values}")
    return values
