"""Small models of every class, with what each is called with: what whole models share is tested on.

A line of :data:`ZOO` is enough for a model to be trained, saved, compiled, split over processes and
looked into. Dropout is in some of them: a run that goes on elsewhere needs its random numbers too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import graphattn as ga

VOCABULARY = 13


def is_real(value: Any) -> bool:
    """Whether a dtype is to be chosen."""
    return isinstance(value, Tensor) and value.is_floating_point()


class Batch(NamedTuple):
    """A call of a model and what it is to answer; every tensor has the examples first."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Tensor

    def part(self, rank: int, of: int) -> Batch:
        """Every `of`-th example, from `rank` on."""

        def own(value: Any) -> Any:
            is_batched = isinstance(value, Tensor) and len(value) == len(self.target)
            return value[rank::of] if is_batched else value

        keywords = {name: own(value) for name, value in self.keywords.items()}
        return Batch(tuple(map(own, self.inputs)), keywords, self.target[rank::of])

    def to(self, dtype: torch.dtype) -> Batch:
        """With floating-point inputs in a dtype."""
        return self._with(lambda x: x.to(dtype) if is_real(x) else x)

    def on(self, device: str) -> Batch:
        """On a device."""
        return self._with(lambda x: x.to(device))

    def _with(self, change: Callable[[Any], Any]) -> Batch:
        kinds = Tensor | ga.TokenGraph

        def own(value: Any) -> Any:
            return change(value) if isinstance(value, kinds) else value

        keywords = {name: own(value) for name, value in self.keywords.items()}
        return Batch(tuple(map(own, self.inputs)), keywords, self.target)


class Model(NamedTuple):
    """How a small model is made, and what it is called with.

    Attributes:
        make: a new one, from torch's random numbers.
        batch: (generator, examples, tokens) -> Batch; images have the tokens that they have.
        has_lengths: whether the number of tokens may change from call to call.
    """

    make: Callable[..., nn.Module]
    batch: Callable[[torch.Generator, int, int], Batch]
    has_lengths: bool = True


def call(model: nn.Module, batch: Batch) -> Tensor:
    """What a model answers."""
    out: Tensor = model(*batch.inputs, **batch.keywords)
    return out


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over all answers: as many in every part of a batch."""
    logits = call(model, batch)
    return functional.cross_entropy(logits.flatten(0, -2).float(), batch.target.flatten())


def exact_loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The same in the dtype of the model."""
    return functional.cross_entropy(call(model, batch).flatten(0, -2), batch.target.flatten())


def batch_of(name: str, seed: int, examples: int = 4, tokens: int = 18) -> Batch:
    """A batch of a model of the zoo."""
    return ZOO[name].batch(torch.Generator().manual_seed(seed), examples, tokens)


def made(name: str, seed: int = 0) -> nn.Module:
    """A model of the zoo."""
    torch.manual_seed(seed)
    return ZOO[name].make()


# What models are called with.


def words(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """Tokens, and for each another one that follows from it and its neighbour."""
    given = torch.randint(VOCABULARY, (examples, tokens), generator=generator)
    return Batch((given,), {}, (given + given.roll(1, -1)) % VOCABULARY)


def padded_words(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """The same, of unequal lengths."""
    batch = words(generator, examples, tokens)
    lengths = torch.randint(tokens // 2, tokens + 1, (examples, 1), generator=generator)
    return batch._replace(keywords={"valid": torch.arange(tokens) < lengths})


# Models.


def encoder(**options: Any) -> ga.models.SequenceEncoder:
    sizes = {"dim": 16, "depth": 2, "heads": 2, **options}
    return ga.models.SequenceEncoder(VOCABULARY, **sizes)


CONSENSUS: dict[str, Any] = {"edge_hidden": 8, "rank": 2}

ZOO: dict[str, Model] = {
    "encoder of dot products": Model(lambda: encoder(dropout=0.1), padded_words),
    "encoder mix": Model(
        lambda: encoder(mixer="mix", step_size="learned", dropout=0.1, **CONSENSUS), words
    ),
    "encoder gka-consensus": Model(
        lambda: encoder(mixer="gka-consensus", rope="isometric", step_size="auto", **CONSENSUS),
        words,
    ),
    "encoder krause": Model(
        lambda: encoder(mixer="krause", window=3, mixer_options={"top_k": [2, 3]}), padded_words
    ),
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """All blocks of a model, those of stages included."""
    return [module for module in model.modules() if isinstance(module, ga.nn.PreNormBlock)]


def same(a: Any, b: Any) -> bool:
    """Whether two nests of tensors agree to the last bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
