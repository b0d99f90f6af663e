"""Protein models and complexes of chains that walk at random: what tests of proteins share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.data import Structure

D, H = 16, 4
MIXERS: dict[str, Any] = {
    "dot": lambda: "dot",
    "krause": lambda: "krause",
    "consensus": lambda: "consensus",
    "mix": lambda: "mix",
    "own": lambda: [ga.nn.GaussianKernelAttention(D, H), "consensus"],
}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def model_of(mixer: str = "mix", **options: Any) -> Any:
    torch.manual_seed(0)
    made = MIXERS[mixer]()
    names = [made] if isinstance(made, str) else made
    if any(name in ("consensus", "mix") for name in names if isinstance(name, str)):
        options = {"mixer_options": {"edge_hidden": 6, "rank": 2}, **options}
    options = {"neighbors": 5, "window": 2, "num_distances": 4, "max_offset": 3, **options}
    return ga.models.ProteinModel(D, 2, H, mixer=made, **options).double().eval()


def letters(count: int, seed: int = 0) -> str:
    index = torch.randint(20, (count,), generator=torch.Generator().manual_seed(seed))
    return "".join(LETTERS[i] for i in index)


def complex_of(*sizes: int, seed: int = 0) -> Structure:
    """Chains that walk through each other in steps of 3.8 Angstrom."""
    generator = torch.Generator().manual_seed(seed)
    walks = []
    for size in sizes:
        steps = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        walks.append((3.8 * steps / steps.norm(dim=1, keepdim=True)).cumsum(0))
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    numbers = torch.cat([torch.arange(1, size + 1) for size in sizes])
    return Structure(
        letters(sum(sizes), seed), torch.cat(walks), index, tuple("ABCD"[: len(sizes)]), numbers
    )


def tokens_of(model: Any, structure: Structure) -> Tensor:
    return model.tokenizer.encode(structure.sequence)
