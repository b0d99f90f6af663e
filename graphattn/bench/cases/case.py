"""One workload of the benchmark: its inputs, its contenders, and the targets for its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from graphattn.bench.cases import least_work as work
from graphattn.bench.cases.least_work import Size
from graphattn.bench.contenders.peers import Run
from graphattn.bench.measuring.passes import Timing, ratio_of_rounds
from graphattn.bench.reporting.record import OURS, Quantity, Row, Verdict

FORWARD, BOTH = "forward", "forward + backward"
TWICE = f"{OURS}, twice the tokens"


# Targets.


@dataclass(frozen=True)
class Target:
    """A bound on a number of one contender, `of`; with `over`, on its ratio to another's.

    `over` names that other contender, or several, of which the fastest is used. ``at_most`` bounds
    of / over, and ``at_least`` over / of: how many times faster or smaller graphattn is. Without
    `over` the bound is in seconds, in bytes, or on the error or the share itself. Other devices
    than `device` have targets of their own.
    """

    quantity: Quantity
    over: tuple[str, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    of: str = OURS
    passes: str = FORWARD
    device: str = "cpu"

    def judge(self, case: str, rows: Mapping[str, Row], timings: Mapping[str, Timing]) -> Verdict:
        """Compare the rows of one pass with the target; without a row, there is no measurement."""
        timed = [name for name in self.over if name in timings]
        other = min(timed, key=lambda name: timings[name].median, default=None)
        measured, spread = None, None
        if self.of in rows and (other or not self.over):
            measured, spread = self._measure(rows, timings, other)
        rival = other or " or ".join(self.over)
        pair = (rival, self.of) if self.at_least is not None else (self.of, rival)
        return Verdict(
            case,
            self.passes,
            self.quantity,
            " / ".join(pair) if self.over else self.of,
            bool(self.over),
            measured,
            spread,
            self.at_most,
            self.at_least,
        )

    def _measure(
        self, rows: Mapping[str, Row], timings: Mapping[str, Timing], other: str | None
    ) -> tuple[float | None, float | None]:
        """Return the number, and the spread if it is a time."""
        if other is None:
            row = rows[self.of]
            return row.number(self.quantity), row.spread if self.quantity == "time" else None
        top, bottom = (other, self.of) if self.at_least is not None else (self.of, other)
        if self.quantity == "time":
            return ratio_of_rounds(timings[top], timings[bottom])
        a, b = rows[top].number(self.quantity), rows[bottom].number(self.quantity)
        return (a / b if a is not None and b else None), None


Targets = tuple[Target, ...]


def in_both_passes(*targets: Target) -> Targets:
    """Require the same of the forward pass and of both passes together."""
    return tuple(replace(target, passes=passes) for target in targets for passes in (FORWARD, BOTH))


def fast(
    over: tuple[str, ...],
    forward: float,
    both: float | None = None,
    *,
    of: tuple[str, ...] = (OURS,),
    device: str = "cpu",
) -> Targets:
    """Require a speed relative to the fastest of `over`, in both passes."""
    times = {FORWARD: forward, BOTH: forward if both is None else both}
    return tuple(
        Target("time", over, at_least=times[passes], of=name, passes=passes, device=device)
        for name in of
        for passes in times
    )


def fast_and_small(
    over: tuple[str, ...], times: float, memory: float, *, device: str = "cpu"
) -> Targets:
    """Require a speed, and a share of memory, relative to the fastest of `over`."""
    small = Target("memory", over, at_most=memory, device=device)
    return (*fast(over, times, device=device), *in_both_passes(small))


def share_of_bound(share: float, *, of: tuple[str, ...] = (OURS,), device: str = "cpu") -> Targets:
    """Require a share of the best that the device could do, in both passes."""
    bounds = (Target("share of bound", at_least=share, of=name, device=device) for name in of)
    return in_both_passes(*bounds)


# Workloads.


def sizes(**numbers: int | tuple[int, int, int]) -> dict[str, Size]:
    """Return the sizes "small", "paper" and "long"; a single number is that of all three."""
    return {
        name: {key: n if isinstance(n, int) else n[k] for key, n in numbers.items()}
        for k, name in enumerate(("small", "paper", "long"))
    }


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
    targets: Targets = ()
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
        own_sizes = self.cuda if device == "cuda" else self.sizes
        return own_sizes.get(size_name, self.sizes[size_name])

    def entries(self, size_name: str, device: str = "cpu") -> dict[str, Entry]:
        """Everything to be timed, by the name it has in tables and records."""
        size = self.size(size_name, device)
        if self.lengths:
            return {
                f"{n:,} tokens": Entry(OURS, self.contenders[OURS], {**size, "tokens": n}, None)
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


def degree_label(contender: str, degree: int) -> str:
    """The name of a contender at so many edges per target."""
    return f"{contender}, degree {degree:,}"
