"""Results of a sweep: a row per trial, and per mixer the learning rates that it bears."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphattn.train.running_loss import TIMES
from graphattn.train.runs.folder import Run
from graphattn.train.runs.records import Row

RESULTS = ("finished", "diverged")
ORIGIN = ("commit", "config", "versions")  # of the numbers of a row, beside its seed


def outcome(run: Run) -> Row:
    """Return the outcome that a sweep keeps of a run that is over.

    It has diverged if the engine said so, or if its last validation loss is not finite, or above
    ten times its first training loss.
    """
    known = [row for row in run.evaluations if _is_finite(row.get("loss"))]
    best = min(known, key=lambda row: row["loss"], default=None)
    last = run.evaluations[-1] if run.evaluations else None
    if run.status == "finished" and last is None:
        raise ValueError("validation must leave examples to compare trials by, got none")
    # Where a short run ended before the engine lost patience, or its own batches did not tell.
    first = next((row["loss"] for row in run.training if _is_finite(row.get("loss"))), math.inf)
    diverged = run.status == "diverged" or last not in known
    diverged = diverged or (last is not None and last["loss"] > TIMES * first > 0)
    return {
        "status": "diverged" if diverged else "finished",
        "loss": None if diverged or last is None else last["loss"],
        "best_loss": best["loss"] if best else None,
        "best_step": best["step"] if best else None,
        "step": run.step,
        "diverged_at": run.step if diverged else None,
        "seconds": run.info.get("seconds"),
        **{name: run.info.get(name) for name in ORIGIN},
    }


@dataclass(frozen=True)
class MixerSummary:
    """Summary of the trials of one mixer.

    Attributes:
        mixer: its name.
        best_lr: where the mean loss over seeds is lowest, among rates at which none diverged.
        loss: the mean there, of the validation losses at the last step.
        spread: their standard deviation over seeds; None for a single one.
        stable: lowest and highest of the rates around `best_lr` without a trial that diverged.
        highest_loss: the mean loss at the highest stable rate.
        trials, diverged, failed, open: how many there are, and how they ended; "open" ones have
            not.

    Example:
        >>> import graphattn as ga
        >>> rows = [{"mixer": "dot", "lr": 1e-3, "seed": 0, "status": "finished", "loss": 2.5}]
        >>> dot, = ga.train.summarize_sweep(rows)
        >>> dot.mixer, dot.best_lr, dot.loss, dot.spread
        ('dot', 0.001, 2.5, None)
    """

    mixer: str
    best_lr: float | None
    loss: float | None
    spread: float | None
    stable: tuple[float, float] | None
    highest_loss: float | None
    trials: int
    diverged: int
    failed: int
    open: int


def summarize_sweep(rows: Iterable[Row]) -> list[MixerSummary]:
    """Per mixer the best learning rate, and the range of rates at which training is stable.

    A rate is stable if it has results and no trial diverged; the range is that around the best
    rate, without a gap. How much worse the loss is at its upper end tells how robust a mixer is to
    a rate that was chosen too high (Consensus, Section 5.1).

    Args:
        rows: of :func:`read_sweep`.

    Example:
        >>> import graphattn as ga
        >>> rows = [{"mixer": "mix", "lr": lr, "seed": 0, "status": status, "loss": loss}
        ...         for lr, status, loss in [(1e-3, "finished", 2.5), (1e-2, "finished", 2.25),
        ...                                  (3e-2, "finished", 2.75), (1e-1, "diverged", None)]]
        >>> mix, = ga.train.summarize_sweep(rows)
        >>> mix.best_lr, mix.stable, mix.highest_loss - mix.loss
        (0.01, (0.001, 0.03), 0.5)
    """
    by_mixer: dict[str, list[Row]] = {}
    for row in rows:
        by_mixer.setdefault(row["mixer"], []).append(row)
    return [_summary(mixer, own) for mixer, own in by_mixer.items()]


def losses_by_rate(rows: Sequence[Row]) -> dict[float, list[float] | None]:
    """Learning rate -> losses of its finished trials; None where a trial diverged.

    Rates without any result are left out.
    """
    found: dict[float, list[float] | None] = {}
    for lr in sorted({row["lr"] for row in rows}):
        own = [row for row in rows if row["lr"] == lr and row["status"] in RESULTS]
        if any(row["status"] == "diverged" for row in own):
            found[lr] = None
        elif own:
            found[lr] = [row["loss"] for row in own]
    return found


def _summary(mixer: str, rows: list[Row]) -> MixerSummary:
    losses = losses_by_rate(rows)
    means = {lr: statistics.fmean(own) for lr, own in losses.items() if own}
    best = min(means, key=lambda lr: means[lr], default=None)
    # A rate without a result yet bounds the range as one that diverged does.
    stable = _around(best, sorted({row["lr"] for row in rows}), means) if best else None
    there = (losses[best] or []) if best else []
    count = [row["status"] for row in rows].count
    return MixerSummary(
        mixer=mixer,
        best_lr=best,
        loss=means[best] if best else None,
        spread=statistics.stdev(there) if len(there) > 1 else None,
        stable=stable,
        highest_loss=means[stable[1]] if stable else None,
        trials=len(rows),
        diverged=count("diverged"),
        failed=count("failed"),
        open=sum(row["status"] not in (*RESULTS, "failed") for row in rows),
    )


def _around(best: float, rates: list[float], means: dict[float, float]) -> tuple[float, float]:
    low = high = rates.index(best)
    while low > 0 and rates[low - 1] in means:
        low -= 1
    while high + 1 < len(rates) and rates[high + 1] in means:
        high += 1
    return rates[low], rates[high]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
