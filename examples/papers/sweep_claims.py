"""The claim of every sweep of the consensus paper, in numbers: how much a high rate costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evidence import Experiment, Verdict, main
from rates import SMALL, Arm, best_rate, losses_at, means, measure_arms, rise, spread

# Edge networks of 32 hidden units in place of the paper's 256, which take half of the time.
OPTIONS = {"edge_hidden": 32, "rank": 4}

CLAIM = (
    "As the learning rate is increased beyond the band used in practice, self-attention (SA) and "
    "sliding-window attention (SW) incur sharp degradation, whereas self-consensus (SC) degrades "
    "more gradually. MIX (attention in the first half of the layers, consensus in the second) "
    "mirrors SA at the best rate and is less sensitive."
)
# Every token sees all others (SA), or those up to two positions away.
ARMS_OF_ENCODERS = {
    "sa": Arm("dot", window=2),
    "sc": Arm("consensus", OPTIONS, window=2),
    "mix": Arm("mix", OPTIONS, window=2),
    "sw": Arm("dot-window", window=2),
}
TRAINING: dict[str, Any] = {
    "length": 128,
    "model_options": SMALL,
    "steps": 600,
    "batch_tokens": 2048,
    "evaluate_every": 200,
    "save_every": 100,
    "keep": 6,
}

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
    shares = ""
    if math.isfinite(rises["sa"]):
        sc, mix = (rises[arm] / rises["sa"] for arm in ("sc", "mix"))
        shares = f"Rise of SC / rise of SA: {sc:.2f}; of MIX: {mix:.2f}. "
    why = (
        f"Best loss and rise: {text}. {shares}MIX is "
        f"{behind:+.3f} nats beside the best SA, whose deviation over seeds is {deviation:.3f}."
    )
    if rises["sa"] < too_little:
        return "inconclusive", why
    gentle = rises["sc"] <= rises["sa"] / 2 and math.isfinite(rises["sc"])
    hybrid = behind <= 2 * deviation and rises["mix"] < rises["sa"]
    if gentle and hybrid:
        return "held", why
    parts = []
    if not gentle:
        finite = math.isfinite(rises["sc"])
        parts.append("SC rises by more than half of SA's rise" if finite else "SC diverges")
    if behind > 2 * deviation:
        parts.append("MIX is worse than SA at its best rate")
    if rises["mix"] >= rises["sa"]:
        parts.append("MIX does not rise less than SA")
    return "not held", f"{why} Refuted, because {', and '.join(parts)}."


def run_sweeps(
    experiment: Experiment,
    arms: dict[str, Arm],
    rates: Sequence[float],
    seeds: int,
    shared: dict[str, Any],
    file: str,
    too_little: float,
) -> None:
    """Run an experiment about this claim; a rise of the loss of `too_little` is degradation."""

    def judged(rows: list[dict[str, Any]]) -> tuple[Verdict, str]:
        return flatter(rows, rates, seeds, too_little)

    main(
        experiment,
        lambda given: measure_arms(given, arms, rates, seeds, shared, file, judged, too_little),
    )
