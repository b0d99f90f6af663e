"""A corpus in memory, with the names of the one that is read from disk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.data import NucleotideTokenizer, ProteinTokenizer


class PlainCorpus:
    def __init__(
        self,
        records: list[Tensor],
        kind: str = "text",
        names: list[str] | None = None,
        groups: list[str] | None = None,
    ) -> None:
        self.records, self.kind = records, kind
        images = kind == "images"
        self.lengths = torch.tensor([1 if images else len(record) for record in records])
        self.num_tokens = int(self.lengths.sum())
        self.names = names or [f"record {n}" for n in range(len(records))]
        self.groups = groups or [""] * len(records)
        self.tokenizer = NucleotideTokenizer() if kind == "nucleotide" else ProteinTokenizer()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.example(i)

    def example(self, i: int, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        if self.kind == "images":
            return {"image": self.records[i], "name": self.names[i]}
        return {"tokens": self.tokens(i, start, stop), "name": self.names[i]}

    def tokens(self, i: int, start: int = 0, stop: int | None = None) -> Tensor:
        return self.records[i][start:stop].clone()


def numbered(lengths: list[int], **names: Any) -> PlainCorpus:
    """Records whose tokens are all different: a token says where in the corpus it stands."""
    tokens = torch.arange(sum(lengths))
    return PlainCorpus(list(tokens.split(lengths)), **names)


def random_records(
    lengths: list[int], kind: str = "protein", seed: int = 0, **names: Any
) -> PlainCorpus:
    generator = torch.Generator().manual_seed(seed)
    records = [torch.randint(4, 20, (n,), generator=generator) for n in lengths]
    return PlainCorpus(records, kind, **names)
