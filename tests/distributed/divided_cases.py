"""Objectives over sequences that ranks divide; the functions run on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphattn as ga
from graphattn.train.runs.divided import Divided

VOCAB, DIM = 7, 8


def sequences(lengths: tuple[int, ...], **more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(len(lengths))
    examples = []
    for n in lengths:
        tokens = torch.randint(VOCAB - 1, (n,), generator=generator)
        examples.append({"tokens": tokens, **{name: make(tokens) for name, make in more.items()}})
    return examples


def structures(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    examples = []
    for n in lengths:
        places = 2 * torch.randn(n, 3, generator=generator, dtype=torch.float64).cumsum(0)
        structure = ga.data.Structure(("GWKACD" * n)[:n], places)
        tokens = ga.models.ProteinModel(8, depth=1, heads=2).tokenizer.encode(structure.sequence)
        examples.append({"tokens": tokens, "structure": structure})
    return examples


def encoder(**options: Any) -> ga.models.SequenceEncoder:
    given = {"depth": 2, "heads": 2, "mixer": "mix", **options}
    return ga.models.SequenceEncoder(VOCAB, DIM, **given)


def causal(**options: Any) -> ga.models.CausalLM:
    return ga.models.CausalLM(VOCAB, DIM, depth=2, heads=2, **options)


ONE, PADDED, SHORT = (30,), (25, 30, 4, 17), (3, 2)  # SHORT: fewer tokens than runs of ranks
CASES: dict[str, Any] = {
    "next token, ring": lambda: (causal(), ga.train.NextToken(1), sequences(ONE)),
    "next token, window and ring": lambda: (
        causal(window=[3, None], positions="learned", num_positions=30),
        ga.train.NextToken(),
        sequences(PADDED),
    ),
    "next token, short": lambda: (causal(mixer="gka"), ga.train.NextToken(), sequences(SHORT)),
    "masked": lambda: (encoder(), ga.train.MaskedTokens(VOCAB - 1), sequences(PADDED)),
    "masked, weighted": lambda: (
        encoder(mixer="linear"),
        ga.train.MaskedTokens(VOCAB - 1, "linear", weight="1/ratio", replace=True),
        sequences(SHORT),
    ),
    "masked, tracks": lambda: (
        ga.models.ProteinModel(DIM, depth=1, heads=2, tracks={"shape": 5}),
        ga.train.MaskedTokens(21, tracks={"shape": "cosine"}),
        sequences(PADDED, tracks=lambda tokens: {"shape": tokens % 5}),
    ),
    "masked, structures": lambda: (
        ga.models.ProteinModel(DIM, depth=2, heads=2, mixer="mix", neighbors=3),
        ga.train.MaskedTokens(21),
        structures((12, 15, 9)),
    ),
    "diffusion": lambda: (
        encoder(noise_dim=4),
        ga.train.AbsorbingDiffusion(VOCAB - 1),
        sequences(PADDED),
    ),
    "classes of sequences": lambda: (
        ga.train.WithHead(encoder(), 3),
        ga.train.Classification(3),
        sequences(PADDED, label=lambda tokens: int(tokens[0]) % 3),
    ),
    "classes of tokens": lambda: (
        ga.train.WithHead(encoder(), 3),
        ga.train.Classification(3, per_token=True),
        sequences(PADDED, labels=lambda tokens: tokens % 3),
    ),
    "regression": lambda: (
        ga.train.WithHead(encoder(), 1),
        ga.train.ResidueRegression(),
        sequences((3,), labels=lambda tokens: tokens.double()),  # without a mask
    ),
}


def mean_and_gradients(
    model: nn.Module, objective: ga.train.Objective, batch: Any, group: Any = None
) -> list[Tensor]:
    """The loss per guess and its gradients; of ranks, from what all of them add up."""
    model.zero_grad()
    loss = objective.loss(model, batch, torch.Generator().manual_seed(5))
    loss.total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    numbers = [loss.total.detach(), torch.tensor(loss.count, dtype=torch.float64), *gradients]
    if group is not None:
        for x in numbers:
            dist.all_reduce(x, group=group)
    total, count, *sums = numbers
    return [total / count, *(x / count for x in sums)]


def objectives_are_the_same(group: Any) -> list[str]:
    """Compare losses, gradients and evaluations with those of one process, in float64."""
    done = []
    for name, make in CASES.items():
        torch.manual_seed(1)
        model, objective, examples = make()
        model.double()
        batch = objective.collate(examples)
        divided = Divided(model, group)
        expected = mean_and_gradients(model, objective, batch)
        actual = mean_and_gradients(divided, objective, batch, group)
        # Distances of residues are made in float32.
        bound = 1e-6 if name == "masked, structures" else 1e-12
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=bound, msg=lambda text: f"{name}: {text}")  # noqa: B023
        alone, together = (objective.evaluate(each, [batch]) for each in (model, divided))
        assert alone.keys() == together.keys()
        for key, value in alone.items():
            same = abs(together[key] - value) <= bound * max(1, abs(value))
            assert same or value != value, (name, key, value, together[key])
        done.append(name)
    return done


def other_masks_on_other_ranks_are_an_error(group: Any) -> None:
    model = Divided(encoder().double(), group)
    objective = ga.train.MaskedTokens(VOCAB - 1)
    torch.manual_seed(dist.get_rank(group))
    batch = objective.collate(sequences(ONE))
    with pytest.raises(ValueError, match=r"tokens of a call, with masks drawn .* must be equal"):
        objective.loss(model, batch)  # without a generator


def no_rank_has_the_logits_of_all_tokens(group: Any) -> list[int]:
    """Count the rows of logits that the head computes and the loss reads on this rank."""
    model = causal().double()
    objective = ga.train.NextToken()
    logits, truth = objective.guesses(Divided(model, group), objective.collate(sequences((41,))))
    return [len(logits), len(truth)]
