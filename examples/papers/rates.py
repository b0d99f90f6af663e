"""Sweeps over learning rates, the form of most experiments about consensus.

An arm is one mechanism with its options. Every arm is trained at every rate with every seed; one
thread per run.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from evidence import Findings, Verdict
from torch import nn

import graphattn as ga
from graphattn.train.engine import fit_prepared
from graphattn.train.runs.checkpoints import checkpoint_path, load_weights

# Experiments about learning rates take the paper's AdamW: weight decay 0.01, gradients clipped to
# norm 1, float32. It names neither warm-up nor decay, so there is none.
PAPERS_OPTIMIZER: dict[str, Any] = {
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "warmup_steps": 0,
    "schedule": "constant",
}
SMALL = {"dim": 64, "depth": 4, "heads": 4}


@dataclass(frozen=True)
class Arm:
    """One mechanism.

    Attributes:
        mixer: the name of the mixer.
        options: its options.
        window: the window of its attention layers, or a list of a short and a long one for a
            pattern; None for all tokens.
        config: further options of the run.
        change: makes the model that is trained from the one that `mixer` names, with a seed.
    """

    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    window: int | Sequence[int] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any, int], nn.Module] | None = None


def train(arm: Arm, config: ga.train.RunConfig) -> ga.train.Run:
    """Train one run with one thread, so that runs side by side do not disturb each other."""
    torch.set_num_threads(1)
    return fit_prepared(prepared_as(arm, config))


def prepared_as(arm: Arm, config: ga.train.RunConfig) -> ga.train.Prepared:
    """Prepare a run, with the model of the arm."""
    prepared = ga.train.prepare(config)
    if arm.change is None:
        return prepared
    return replace(prepared, model=arm.change(prepared.model, config.seed))


def run_at(arm: Arm, folder: Path, step: int) -> ga.train.Prepared:
    """Prepare the run in a folder again, with the weights that its model had at a step."""
    prepared = prepared_as(arm, ga.train.read_run(folder).config)
    load_weights(prepared.model, checkpoint_path(folder, step) / "model.safetensors")
    return prepared


def config_for(arm: Arm, shared: dict[str, Any], folder: Path) -> ga.train.RunConfig:
    """Return the options of all runs of an arm."""
    return ga.train.RunConfig(
        **{**PAPERS_OPTIMIZER, **shared, **arm.config},
        window=arm.window,
        mixer_options=arm.options,
        out=str(folder),
    )


def run_arms(
    arguments: Namespace,
    arms: dict[str, Arm],
    rates: Sequence[float],
    seeds: int,
    shared: dict[str, Any],
) -> list[dict[str, Any]]:
    """Train all arms, seed by seed, and return a row per run, with "arm"."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for count in range(1, seeds + 1):
        for name, arm in arms.items():
            folder = Path(arguments.work) / name
            if arguments.partial:
                if folder.is_dir():
                    rows[name] = ga.train.read_sweep(folder)
                continue
            rows[name] = ga.train.run_sweep(
                config_for(arm, shared, folder),
                mixers=[arm.mixer],
                lrs=list(rates),
                seeds=count,
                processes=arguments.processes,
                train=partial(train, arm),
                tell=partial(tell, name),
            )
    return [
        {"arm": name, "curve": curve_of(Path(arguments.work) / name / row["folder"]), **row}
        for name in rows
        for row in rows[name]
    ]


def curve_of(folder: Path) -> list[tuple[int, float]]:
    """Return steps and validation losses of a run, from its log."""
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    points = (json.loads(line) for line in lines)
    return [(one["step"], one["loss"]) for one in points if one["split"] == "validation"]


def tell(arm: str, row: dict[str, Any]) -> None:
    loss = row["status"] if row["loss"] is None else f"{row['loss']:.4f}"
    print(f"{arm}, lr {row['lr']:g}, seed {row['seed']}: {loss}", flush=True)


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a record keeps of every run that ended."""
    names = ("arm", "lr", "seed", "status", "loss", "best_loss", "best_step", "step", "seconds")
    return [{name: row[name] for name in names} for row in rows if row["status"] in ENDED]


ENDED = ("finished", "diverged")


def cpu_hours(rows: list[dict[str, Any]]) -> float:
    return sum(row["seconds"] or 0.0 for row in rows) / 3600


def means(rows: list[dict[str, Any]], arm: str) -> dict[float, float]:
    """Return the mean loss of an arm at every rate; infinite if one of its runs diverged."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["arm"] == arm and row["status"] in ENDED:
            loss = math.inf if row["loss"] is None else row["loss"]
            found.setdefault(row["lr"], []).append(loss)
    return {lr: statistics.fmean(losses) for lr, losses in sorted(found.items())}


def spread(losses: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; None for fewer than two finite losses."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.stdev(finite) if len(finite) > 1 else None


def summary(mechanism: str, setting: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return a row of a table: mean and standard deviation of values, if all are there."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values)
    return {
        "mechanism": mechanism,
        "setting": setting,
        "mean": statistics.fmean(known) if whole else None,
        "spread": spread(known) if whole else None,
        "seeds": len(values),
    }


def losses_at(rows: list[dict[str, Any]], arm: str, lr: float) -> list[float]:
    return [
        math.inf if row["loss"] is None else row["loss"]
        for row in rows
        if row["arm"] == arm and row["lr"] == lr and row["status"] in ENDED
    ]


def rise(rows: list[dict[str, Any]], arm: str) -> float:
    """Return by how much the mean loss at the highest rate is above that at the best rate."""
    by_rate = means(rows, arm)
    return by_rate[max(by_rate)] - min(by_rate.values())


def best_rate(rows: list[dict[str, Any]], arm: str) -> float:
    by_rate = means(rows, arm)
    return min(by_rate, key=lambda lr: by_rate[lr])


def table_of(rows: list[dict[str, Any]], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per arm and rate: mean and standard deviation of the validation loss."""
    numbers = []
    for arm in arms:
        for lr, mean in means(rows, arm).items():
            losses = losses_at(rows, arm, lr)
            diverged = sum(not math.isfinite(loss) for loss in losses)
            numbers.append(
                {
                    "mechanism": arm,
                    "setting": f"lr {lr:g}",
                    "mean": mean if math.isfinite(mean) else None,
                    "spread": spread(losses),
                    "seeds": len(losses),
                    "diverged": diverged,
                }
            )
    return numbers


def widths_of(rows: list[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """Return a row per arm with the width of its stable range in decades, and its interval.

    A rate is stable if its loss is at most `tolerance` (nats) above the best one.
    """
    named = [{**row, "mixer": row["arm"]} for row in rows]
    numbers = []
    for found in ga.train.summarize_sweep(named, tolerance=tolerance):
        interval = found.decades_interval
        numbers.append(
            {
                "mechanism": found.mixer,
                "setting": f"decades within {tolerance:g} nats of the best (95 % interval)",
                "mean": found.decades,
                "spread": None if interval is None else "{:.2g} to {:.2g}".format(*interval),
                "seeds": len({row["seed"] for row in named if row["mixer"] == found.mixer}),
            }
        )
    return numbers


def curves(rows: list[dict[str, Any]], ax: Any) -> None:
    """Draw the loss of every run over the learning rate, with a line through the means."""
    ga.plot.sweep_curves([{**row, "mixer": row["arm"]} for row in rows], ax=ax)


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


def measure_arms(
    arguments: Namespace,
    arms: dict[str, Arm],
    rates: Sequence[float],
    seeds: int,
    shared: dict[str, Any],
    file: str,
    judge: Callable[[list[dict[str, Any]]], tuple[Verdict, str]],
    tolerance: float = 0.1,
) -> Findings:
    """Train all arms at all rates with all seeds; `judge` decides from the rows.

    `tolerance` is that of :func:`widths_of`.
    """
    data = str(Path(arguments.data) / file)
    rows = run_arms(arguments, arms, rates, seeds, {**shared, "data": data})
    verdict, why = judge(rows)
    return Findings(
        numbers=[*table_of(rows, list(arms)), *widths_of(rows, tolerance)],
        verdict=verdict,
        why=why,
        runs=kept(rows),
        seeds=list(range(seeds)),
        cpu_hours=cpu_hours(rows),
        draw=lambda ax: curves(rows, ax),
        columns=("validation loss (nats)", "deviation"),
    )
