"""One workload of the benchmark: its inputs, its contenders, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.least_work import Size
from graphattn.bench.cases.targets import Target
from graphattn.bench.contenders.peers import Run
from graphattn.bench.reporting.record import OURS

FORWARD, BOTH = "forward", "forward + backward"
TWICE = f"{OURS}, twice the tokens"


class Entry(NamedTuple):
    """Contender that is run under one name."""

    contender: str
    run: Run
    size: Size
    beside: str | None = OURS  # the entry that its times are divided by


@dataclass(frozen=True)
class BenchmarkCase:
    """One workload; every contender computes the same from the same inputs.

    With `lengths`, a number of tokens takes a contender's place: graphattn alone, at every length.
    With `degrees`, all contenders run once for every number of edges per target. With `twice`,
    graphattn runs over twice the tokens too, in the same rounds.
    """

    name: str
    title: str
    sizes: dict[str, Size]
    make: Callable[[Size, torch.device, torch.dtype], Any]
    contenders: dict[str, Run]
    dot_products: dict[str, Run] = field(default_factory=dict)  # over the same edges
    yardsticks: dict[str, Run] = field(default_factory=dict)  # they compute something else
    targets: tuple[Target, ...] = ()
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    degrees: dict[str, tuple[int, ...]] = field(default_factory=dict)
    twice: bool = False
    backward: bool = True
    long_passes: bool = False  # three each will do, with all threads, but at the small size
    memory: bool = True  # whether the peak is measured, from inputs made anew
    work: work.Count = work.unknown
    cuda: dict[str, Size] = field(default_factory=dict)  # sizes on a GPU, where they are others
    devices: tuple[str, ...] = ("cpu", "cuda")

    def runs(self) -> dict[str, Run]:
        """Everything to be timed, by the name of the contender."""
        return {**self.contenders, **self.dot_products, **self.yardsticks}

    def size(self, size_name: str, device: str) -> Size:
        """The size of that name on this kind of device."""
        sizes = self.cuda if device == "cuda" else self.sizes
        return sizes.get(size_name, self.sizes[size_name])

    def entries(self, size_name: str, device: str = "cpu") -> dict[str, Entry]:
        """Everything to be timed, by the name it has in tables and records."""
        size = self.size(size_name, device)
        if self.lengths:
            return {
                tokens_label(n): Entry(OURS, self.contenders[OURS], {**size, "tokens": n}, None)
                for n in self.lengths[size_name]
            }
        if self.degrees:
            return {
                degree_label(name, n): Entry(
                    name,
                    run,
                    {**size, "degree": n},
                    None if name == OURS else degree_label(OURS, n),
                )
                for n in self.degrees[size_name]
                for name, run in self.runs().items()
            }
        entries = {name: Entry(name, run, size) for name, run in self.runs().items()}
        if self.twice:
            longer = {**size, "tokens": 2 * size["tokens"]}
            entries[TWICE] = Entry(OURS, self.contenders[OURS], longer)
        return entries


def tokens_label(tokens: int) -> str:
    """The name of a length."""
    return f"{tokens:,} tokens"


def degree_label(contender: str, degree: int) -> str:
    """The name of a contender at so many edges per target."""
    return f"{contender}, degree {degree:,}"
