"""Text of a printed plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MOST_LISTED = 16  # ranks, one per line
MOST_NAMED = 5  # senders in a line


def lines_of(plan: Any, dtype: torch.dtype, features: int, worth_hiding: int) -> Iterator[str]:
    """Write what :meth:`CommunicationPlan.describe` returns, line by line.

    `worth_hiding` are the bytes from which layers compute something while they travel.
    """
    at_once = plan.exchange == "rows"
    way = "all rows at once, before the operation" if at_once else "rows in rounds of a ring"
    zigzag = ", layout zigzag" if plan.target_layout.zigzag else ""
    yield f"Plan of communication: {plan.ranks:,} ranks, {way}{zigzag}"
    yield plan.title()
    if plan.ranks <= MOST_LISTED:
        yield "  rank  tokens  receives rows from"
        for rank, (tokens, rows) in enumerate(zip(plan.own_rows, plan.received_rows, strict=True)):
            yield f"  {rank:>4}  {tokens:>6,}  {rows:,}{senders(plan.senders(rank))}"
    else:
        yield f"  rows that a rank owns: {range_of(plan.own_rows)}"
        yield f"  rows that it receives: {range_of(plan.received_rows)}"
        yield f"  rows that it sends: {range_of(plan.sent_rows)}"
        yield f"  ranks that it receives from: {range_of(plan.partners)}"
    if plan.broadcast:
        yield f"  queries of {len(plan.broadcast)} global tokens go to all ranks, results come back"
    if (widest := plan.widest_state()) > 0:
        states = int(plan.states.received.max())
        yield (
            f"  linear attention sends states in place of rows, if heads have at most {widest:,} "
            f"features: {states:,} to the busiest rank"
        )
    yield f"edges per rank: {range_of(plan.edges)}, largest / mean {plan.balance:.2f}"
    forward = int(plan.bytes(dtype, features).max())
    backward = int(plan.bytes(dtype, features, backward=True).max())
    gathered = int(plan.all_gather_bytes(dtype, features).max())
    times = f", {gathered / forward:,.3g} times the forward" if forward else ""
    name = str(dtype).removeprefix("torch.")
    yield f"one layer, {features:,} numbers of {name} per row, received by the busiest rank:"
    yield (
        f"  forward {with_unit(forward, 'B')}, backward {with_unit(backward, 'B')}; "
        f"all-gather {with_unit(gathered, 'B')} each{times}"
    )
    if plan.exchange == "rows" and forward >= worth_hiding and plan.has_inside:
        yield f"  targets computed while they travel, per rank: {range_of(plan.inside_targets)}"
    there, back = (plan.seconds(dtype, features, backward=after) for after in (False, True))
    yield (
        "predicted for H100 SXM in nodes of 8, not measured: "
        f"forward {with_unit(there, 's')}, backward {with_unit(back, 's')}"
    )


def senders(counts: list[tuple[int, int]]) -> str:
    """Write from which ranks how many rows come."""
    rows = [f"rank {sender} ({count:,})" for sender, count in counts]
    if len(rows) > MOST_NAMED:
        rows[MOST_NAMED - 1 :] = [f"{len(rows) - MOST_NAMED + 1} other ranks"]
    return ": " + ", ".join(rows) if rows else ""


def range_of(numbers: Tensor) -> str:
    """Write the smallest and the largest of some integers, and their mean."""
    mean = float(numbers.double().mean())
    return f"{numbers.min():,} to {numbers.max():,}, mean {mean:,.1f}"


def with_unit(number: float, unit: str) -> str:
    """Write a number with three digits: 1.04 MB, 12 µs."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3)):
        if number >= size and (size <= 1 or unit == "B"):
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number * 1e6:.3g} µs" if unit == "s" else f"{number:g} {unit}"
