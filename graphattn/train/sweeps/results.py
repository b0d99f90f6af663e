"""Results of a sweep: a row per trial, and the range of stable learning rates per mixer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphattn.train.running_loss import TIMES
from graphattn.train.runs.folder import Run
from graphattn.train.runs.records import Row

RESULTS = ("finished", "diverged")
TOLERANCE = 0.1  # by how much the loss at a stable rate may be above the best one
ORIGIN = ("commit", "config", "versions")  # origin of the numbers of a row, in addition to its seed


def outcome(run: Run) -> Row:
    """Return the result of a finished run, as a sweep stores it.

    It has diverged if its status says so, if its last validation loss is not finite, or if that is
    more than ten times its first training loss.
    """
    known = [row for row in run.evaluations if _is_finite(row.get("loss"))]
    best = min(known, key=lambda row: row["loss"], default=None)
    last = run.evaluations[-1] if run.evaluations else None
    if run.status == "finished" and last is None:
        raise ValueError(
            "validation must be large enough to contain examples, which compare the trials, got "
            "none"
        )
    # A short run can end before the engine detects the divergence.
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


def variant_of(row: Mapping[str, Any]) -> str:
    """Return the mixer of a trial and, if the sweep has a grid, its options: "krause, window=2"."""
    options = row.get("options") or {}
    return ", ".join([row["mixer"], *(f"{name}={value}" for name, value in options.items())])


@dataclass(frozen=True)
class MixerSummary:
    """Summary of the trials of one mixer, with the same options if the sweep has a grid.

    Attributes:
        mixer: its name, and the options of the grid: "krause, window=2".
        best_lr: the learning rate with the lowest mean loss over seeds, among those where no trial
            diverged.
        loss: the mean validation loss at the last step, at that rate.
        spread: standard deviation of these losses over seeds; None for a single seed.
        stable: lowest and highest rate of the range of stable rates around `best_lr`, see
            :func:`summarize_sweep`.
        highest_loss: the mean loss at the highest stable rate.
        decades: width of that range, log10(highest / lowest rate). It is as coarse as the rates of
            the sweep, and a lower bound if the range ends at the lowest or highest of them.
        decades_interval: confidence interval (95 %, Student's t) of the mean width over seeds, each
            with the range of its own losses, cut at 0; None for a single seed.
        trials, diverged, failed, open: number of trials, and of those that diverged, failed, or
            have not ended (open).

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
    decades: float | None
    decades_interval: tuple[float, float] | None
    trials: int
    diverged: int
    failed: int
    open: int


def summarize_sweep(
    rows: Iterable[Row], *, tolerance: float | str = TOLERANCE
) -> list[MixerSummary]:
    """Find the best learning rate of every mixer, and the range of stable rates around it.

    A rate is stable if no trial diverged, and its mean loss is at most `tolerance` above that of
    the mixer's best rate: a run that ended far above it has not trained, even if its loss stayed
    finite. The range contains the best rate and has no gap. A wide range shows that a mixer is
    robust to a learning rate that is too high (Consensus, Section 5.1). The paper gives no number
    for "sharp degradation", so the default tolerance is ours.

    Args:
        rows: rows from :func:`read_sweep`.
        tolerance: the largest rise of the loss, >= 0: a number, in the unit of the losses (nats,
            for most objectives), or a share of the best loss, such as "5%".

    Raises:
        ValueError: if `tolerance` is neither.

    Example:
        >>> import graphattn as ga
        >>> rows = [{"mixer": "mix", "lr": lr, "seed": 0, "status": status, "loss": loss}
        ...         for lr, status, loss in [(1e-3, "finished", 2.5), (1e-2, "finished", 2.25),
        ...                                  (3e-2, "finished", 2.75), (1e-1, "diverged", None)]]
        >>> mix, = ga.train.summarize_sweep(rows, tolerance=0.25)
        >>> mix.best_lr, mix.stable, mix.highest_loss - mix.loss
        (0.01, (0.001, 0.01), 0.0)
        >>> mix.decades
        1.0
        >>> ga.train.summarize_sweep(rows, tolerance="25%")[0].stable
        (0.001, 0.03)
    """
    rise, is_share = _as_tolerance(tolerance)
    by_mixer: dict[str, list[Row]] = {}
    for row in rows:
        by_mixer.setdefault(variant_of(row), []).append(row)
    return [_summary(mixer, trials, rise, is_share) for mixer, trials in by_mixer.items()]


def losses_by_rate(rows: Sequence[Row]) -> dict[float, list[float] | None]:
    """Map each learning rate to the losses of its finished trials, or to None if a trial diverged.

    Rates without a result are left out.
    """
    losses: dict[float, list[float] | None] = {}
    for lr in sorted({row["lr"] for row in rows}):
        results = [row for row in rows if row["lr"] == lr and row["status"] in RESULTS]
        if any(row["status"] == "diverged" for row in results):
            losses[lr] = None
        elif results:
            losses[lr] = [row["loss"] for row in results]
    return losses


def _summary(mixer: str, rows: list[Row], rise: float, is_share: bool) -> MixerSummary:
    losses = losses_by_rate(rows)
    means = _means(losses)
    best = min(means, key=lambda lr: means[lr], default=None)
    stable = _stable(rows, rise, is_share)
    there = (losses[best] or []) if best else []
    count = [row["status"] for row in rows].count
    return MixerSummary(
        mixer=mixer,
        best_lr=best,
        loss=means[best] if best else None,
        spread=statistics.stdev(there) if len(there) > 1 else None,
        stable=stable,
        highest_loss=means[stable[1]] if stable else None,
        decades=math.log10(stable[1] / stable[0]) if stable else None,
        decades_interval=_interval(_widths(rows, rise, is_share)) if stable else None,
        trials=len(rows),
        diverged=count("diverged"),
        failed=count("failed"),
        open=sum(row["status"] not in (*RESULTS, "failed") for row in rows),
    )


def _means(losses: Mapping[float, list[float] | None]) -> dict[float, float]:
    return {lr: statistics.fmean(values) for lr, values in losses.items() if values}


def _stable(rows: list[Row], rise: float, is_share: bool) -> tuple[float, float] | None:
    """Return the range of stable rates around the best one; None if no trial has finished."""
    means = _means(losses_by_rate(rows))
    if not means:
        return None
    best = min(means, key=lambda lr: means[lr])
    limit = means[best] + (rise * abs(means[best]) if is_share else rise)
    limit += 1e-12 * abs(limit)  # rounding
    near = {lr for lr, loss in means.items() if loss <= limit}
    # A rate without a result ends the range, as a diverged one does.
    return _around(best, sorted({row["lr"] for row in rows}), near)


def _widths(rows: list[Row], rise: float, is_share: bool) -> list[float]:
    """Return the width of the stable range of every seed, in decades.

    A seed whose trials have not all ended, or that lacks a rate of others, is left out: its range
    would be too narrow.
    """
    widths, rates = [], {row["lr"] for row in rows}
    for seed in dict.fromkeys(row.get("seed") for row in rows):
        own = [row for row in rows if row.get("seed") == seed]
        ended = {row["lr"] for row in own if row["status"] in RESULTS}
        if ended == rates and all(row["status"] in RESULTS for row in own):
            found = _stable(own, rise, is_share)
            widths.append(math.log10(found[1] / found[0]) if found else 0.0)
    return widths


def _interval(values: list[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, by Student's t, cut at 0."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return max(mean - half, 0.0), mean + half


def _around(best: float, rates: list[float], stable: set[float]) -> tuple[float, float]:
    low = high = rates.index(best)
    while low > 0 and rates[low - 1] in stable:
        low -= 1
    while high + 1 < len(rates) and rates[high + 1] in stable:
        high += 1
    return rates[low], rates[high]


def _as_tolerance(tolerance: Any) -> tuple[float, bool]:
    """Return the number, and whether it is a share of the best loss."""
    number, is_share = tolerance, False
    if isinstance(tolerance, str) and tolerance.strip().endswith("%"):
        try:
            number, is_share = float(tolerance.strip()[:-1]) / 100, True
        except ValueError:
            number = tolerance
    if isinstance(number, bool) or not _is_finite(number) or number < 0:
        raise ValueError(
            'tolerance must be a finite number >= 0, or a share of the best loss such as "5%", got '
            f"{tolerance!r}"
        )
    return float(number), is_share


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
