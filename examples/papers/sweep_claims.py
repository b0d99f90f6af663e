"""The claim of every sweep of the consensus paper, in numbers: how much a high rate costs."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import Findings, Verdict
from rates import (
    PAPERS_OPTIMIZER,
    Arm,
    best_rate,
    cpu_hours,
    curves,
    kept,
    losses_at,
    means,
    rise,
    run_arms,
    spread,
    table_of,
    widths_of,
)

# Edge networks of 32 hidden units in place of the paper's 256, which take half of the time.
OPTIONS = {"edge_hidden": 32, "rank": 4}

PREDICTION = (
    "The rise of an arm is its mean validation loss at the highest rate minus that at its best "
    "rate. The rise of SC is at most half of the rise of SA; the best mean loss of MIX is at most "
    "two standard deviations (over seeds, of SA at its best rate) above that of SA, and the rise "
    "of MIX is smaller than the rise of SA. A run that diverges counts as an infinite loss."
)


def refuted(too_little: float) -> str:
    """Say what refutes the claim; a rise of SA below `too_little` (nats) is no degradation."""
    return (
        "A rise of SC above half of that of SA, or a MIX that is worse at its best rate than SA by "
        "more than two standard deviations or has no smaller rise than SA. If SA itself does not "
        f"rise by {too_little:g} nats, no rate of the sweep is too high, and the experiment says "
        "nothing."
    )


def flatter(
    rows: list[dict[str, Any]], rates: Sequence[float], seeds: int, too_little: float
) -> tuple[Verdict, str]:
    """Return whether the claim held, and the numbers that decide."""
    arms = ("sa", "sc", "mix")
    counts = [len(losses_at(rows, arm, lr)) for arm in arms for lr in rates]
    if min(counts) < seeds:
        done, planned = sum(counts), seeds * len(counts)
        return "open", f"{done} of {planned} runs of SA, SC and MIX are done."
    rises = {arm: rise(rows, arm) for arm in arms}
    bests = {arm: min(means(rows, arm).values()) for arm in arms}
    deviation = spread(losses_at(rows, "sa", best_rate(rows, "sa"))) or 0.0
    behind = bests["mix"] - bests["sa"]
    text = ", ".join(
        f"{arm.upper()} {bests[arm]:.3f} at {best_rate(rows, arm):g} and "
        + (f"{rises[arm]:.3f} more" if math.isfinite(rises[arm]) else "diverged")
        + f" at {max(rates):g}"
        for arm in arms
    )
    why = (
        f"Best loss and rise: {text}. Rise of SC / rise of SA: "
        f"{rises['sc'] / rises['sa']:.2f}; of MIX: {rises['mix'] / rises['sa']:.2f}. MIX is "
        f"{behind:+.3f} nats beside the best SA, whose deviation over seeds is {deviation:.3f}."
    )
    if rises["sa"] < too_little:
        return "inconclusive", why
    gentle = rises["sc"] <= rises["sa"] / 2 and math.isfinite(rises["sc"])
    hybrid = behind <= 2 * deviation and rises["mix"] < rises["sa"]
    if gentle and hybrid:
        return "held", why
    parts = [] if gentle else ["SC rises by more than half of SA's rise"]
    if behind > 2 * deviation:
        parts.append("MIX is worse than SA at its best rate")
    if rises["mix"] >= rises["sa"]:
        parts.append("MIX does not rise less than SA")
    return "not held", f"{why} Refuted, because {', and '.join(parts)}."


def config_of(
    arms: dict[str, Arm], rates: Sequence[float], shared: dict[str, Any], file: str, about: str
) -> dict[str, Any]:
    """Return everything that determines the numbers of a sweep, as its record keeps it."""
    return {
        "arms": {
            name: {"mixer": arm.mixer, **arm.options, "window": arm.window, **arm.config}
            for name, arm in arms.items()
        },
        "rates": list(rates),
        **PAPERS_OPTIMIZER,
        **shared,
        "files": {file: about},
    }


def measure_sweep(
    arguments: Namespace,
    arms: dict[str, Arm],
    rates: Sequence[float],
    seeds: int,
    shared: dict[str, Any],
    file: str,
    too_little: float,
) -> Findings:
    """Train all arms at all rates, and compare what a high rate costs them."""
    data = str(Path(arguments.data) / file)
    rows = run_arms(arguments, arms, rates, seeds, {**shared, "data": data})
    verdict, why = flatter(rows, rates, seeds, too_little)
    return Findings(
        numbers=[*table_of(rows, list(arms)), *widths_of(rows)],
        verdict=verdict,
        why=why,
        runs=kept(rows),
        seeds=list(range(seeds)),
        cpu_hours=cpu_hours(rows),
        draw=lambda ax: curves(rows, ax),
        columns=("validation loss (nats)", "deviation"),
    )
