"""Small models of every class, with what each is called with: what whole models share is tested on.

A line of :data:`ZOO` is enough for a model to be trained, saved, compiled, split over processes and
looked into. Dropout is in some of them: a run that goes on elsewhere needs its random numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

import graphattn as ga

VOCABULARY = 13
HIDDEN = 0.7  # of the tokens of a text
ALONE = HIDDEN * math.log(VOCABULARY - 1)  # the least loss of a model whose tokens see nothing else


class Batch(NamedTuple):
    """A call of a model and what it is to answer; every tensor has the examples first."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Tensor

    def part(self, rank: int, of: int) -> Batch:
        """Every `of`-th example, from `rank` on."""
        size = len(self.target)
        batch = self._with(lambda x: x[rank::of] if len(x) == size else x)
        return batch._replace(target=self.target[rank::of])

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point inputs in a dtype."""
        return self._with(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def on(self, device: str) -> Batch:
        """Return the batch with its inputs on a device, and its target where it was."""
        return self._with(lambda x: x.to(device))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return Batch(*tree_map(changed, (self.inputs, self.keywords)), self.target)


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
    """Call a model with a batch, and return its output."""
    out: Tensor = model(*batch.inputs, **batch.keywords)
    return out


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over all answers: as many in every part of a batch."""
    logits = call(model, batch)
    return functional.cross_entropy(logits.flatten(0, -2).float(), batch.target.flatten())


def exact_loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over all answers, in the dtype of the model."""
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
    """Texts of one letter each, of which most are hidden (0): other tokens tell which it is."""
    letters = torch.randint(1, VOCABULARY, (examples, 1), generator=generator)
    letters = letters.expand(-1, tokens).contiguous()
    hidden = torch.rand(examples, tokens, generator=generator) < HIDDEN
    return Batch((letters.masked_fill(hidden, 0),), {}, letters)


def padded_words(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """Texts of one letter each, mostly hidden, of unequal lengths."""
    batch = words(generator, examples, tokens)
    lengths = torch.randint(tokens // 2, tokens + 1, (examples, 1), generator=generator)
    return batch._replace(keywords={"valid": torch.arange(tokens) < lengths})


def noisy_words(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """Texts of one letter each, mostly hidden, with a noise level per text, as diffusion has it."""
    batch = words(generator, examples, tokens)
    return batch._replace(keywords={"noise_level": torch.rand(examples, generator=generator)})


def images(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """Bright and dark pixels; the class is the share of bright ones, in thirds."""
    classes = torch.randint(4, (examples,), generator=generator)
    share = (classes / 3)[:, None, None, None]
    bright = torch.rand(examples, 1, 8, 8, generator=generator) < share
    return Batch((2.0 * bright - 1,), {}, classes)


def residues(generator: torch.Generator, examples: int, tokens: int) -> Batch:
    """Two chains in space, another sequence for each example, and a class per residue beside it."""
    batch = words(generator, examples, tokens)
    kinds = torch.randint(3, (examples, tokens), generator=generator)
    return batch._replace(
        keywords={"structure": two_helices(tokens), "context": {"secondary": kinds}}
    )


def two_helices(tokens: int) -> ga.data.Structure:
    """Alpha helices side by side: 100 degrees and 1.5 Angstrom per residue, radius 2.3."""
    place = torch.arange(tokens, dtype=torch.float32)
    half = tokens // 2
    chain = (place >= half).long()
    along, angle = place - half * chain, torch.deg2rad(100 * place)
    x = torch.stack([2.3 * angle.cos() + 9 * chain, 2.3 * angle.sin(), 1.5 * along], dim=1)
    return ga.data.Structure("A" * tokens, x, chain_index=chain, chain_ids=("A", "B"))


# Models.


def encoder(**options: Any) -> ga.models.SequenceEncoder:
    sizes = {"dim": 16, "depth": 2, "heads": 2, **options}
    return ga.models.SequenceEncoder(VOCABULARY, **sizes)


def causal(**options: Any) -> ga.models.CausalLM:
    sizes = {"dim": 16, "depth": 2, "heads": 2, **options}
    return ga.models.CausalLM(VOCABULARY, **sizes)


def vision(**options: Any) -> ga.models.VisionTransformer:
    return ga.models.VisionTransformer(8, 2, 4, 16, 2, 2, channels=1, **options)


def shaken(model: nn.Module) -> nn.Module:
    """Change every parameter a little, as training does: nothing stays at 0 that starts there."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def protein(**options: Any) -> ga.models.ProteinModel:
    sizes = {"neighbors": 4, "context": {"secondary": 3}, "mixer_options": CONSENSUS}
    return ga.models.ProteinModel(16, 2, 2, **sizes, **options)


CONSENSUS: dict[str, Any] = {"edge_hidden": 8, "rank": 2}
SHORT_AND_LONG: dict[str, Any] = {
    "window": (3, 8),
    "window_pattern": "SL",
    "mixer_options": CONSENSUS,
}

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
    "diffusion": Model(
        lambda: shaken(
            encoder(
                mixer="mix", noise_dim=8, norm="rms", drop_path=0.2, zero_head=True, **CONSENSUS
            )
        ),
        noisy_words,
    ),
    "language": Model(
        lambda: causal(mixer="mix", tie_weights=True, dropout=0.1, **SHORT_AND_LONG), words
    ),
    "linear language": Model(
        lambda: causal(mixer="linear", norm="rms", bias=False, rope=False), words
    ),
    "language with value embeddings": Model(
        lambda: causal(mixer="krause", value_embeddings=True, window=6, dropout=0.1), words
    ),
    "language of two branches": Model(
        lambda: causal(
            mixer="dot+krause", mixer_options={"krause_window": 6, "top_k": 3}, tie_weights=True
        ),
        words,
    ),
    "vision": Model(lambda: vision(drop_path=0.2), images, has_lengths=False),
    "krause vision": Model(
        lambda: vision(mixer="krause", radius=1, mixer_options={"top_k": [2, 3]}),
        images,
        has_lengths=False,
    ),
    "swin": Model(
        lambda: ga.models.SwinTransformer(
            8, 1, 4, 8, (2, 1), (1, 2), window_size=4, channels=1, drop_path=0.1
        ),
        images,
        has_lengths=False,
    ),
    "protein": Model(lambda: protein(mixer="mix", dropout=0.1), residues),
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
