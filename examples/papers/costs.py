"""Costs of a training step of every arm, and losses at equal cost.

The cost is CPU time of one thread. It is measured in turns, a step of every arm after the other,
so that all arms meet the same load of the machine; the least time of an arm is its cost.
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from evidence import Findings, Verdict, once
from rates import (
    ENDED,
    Arm,
    config_for,
    cpu_hours,
    kept,
    prepared_as,
    run_arms,
    spread,
    summary,
    table_of,
)
from torch.nn.utils import clip_grad_norm_

import graphattn as ga

ROUNDS = 15


def seconds_per_step(
    arguments: Namespace, arms: dict[str, Arm], shared: dict[str, Any]
) -> dict[str, float]:
    """Return the CPU seconds of a training step of every arm, measured once per folder of runs."""

    def measure() -> dict[str, float]:
        folder = Path(arguments.work)
        return in_turns({name: _step(arm, config_for(arm, shared, folder))
                         for name, arm in arms.items()})  # fmt: skip

    always = Namespace(partial=False)  # it takes seconds
    return once(always, Path(arguments.work) / "costs.json", measure) or {}


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the least CPU seconds of every call, of one thread; the calls take turns."""
    torch.set_num_threads(1)
    least = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - start)
    return least


def _step(arm: Arm, config: ga.train.RunConfig) -> Callable[[], None]:
    """Return a function that makes one step of training, with a full batch."""
    prepared = prepared_as(arm, config.replace(mixer=arm.mixer))
    model, objective = prepared.model.train(), prepared.objective
    count = config.batch_tokens // int(prepared.train.lengths.max())
    batch = objective.collate(prepared.train.__getitems__(range(count)))
    groups = ga.train.parameter_groups(model, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=1e-4)

    def step() -> None:
        loss = objective.loss(model, batch)
        (loss.total / loss.count).backward()
        clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_after(row: dict[str, Any], steps: float) -> float:
    """Return the validation loss of a run after so many steps, on lines between evaluations."""
    if row["status"] != "finished":
        return math.inf
    evaluated, losses = zip(*row["curve"], strict=True)
    return float(numpy.interp(steps, evaluated, losses))


def losses_in_time(rows: list[dict[str, Any]], costs: dict[str, float]) -> dict[str, list[float]]:
    """Return the losses of all runs after the time in which the cheapest arm makes its steps.

    All rows have the same number of steps, and those of an arm the same rate.
    """
    end = min(row["step"] * costs[row["arm"]] for row in rows if row["status"] == "finished")
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(loss_after(row, end / costs[row["arm"]]))
    return found


class Pair(NamedTuple):
    """Mean losses of two arms after the same CPU time, each at its best rate.

    `deviation` is the larger of the two standard deviations over seeds.
    """

    loss: float
    other: float
    deviation: float


def at_equal_cost(
    rows: list[dict[str, Any]], costs: dict[str, float], arm: str, other: str, steps: int
) -> Pair:
    """Compare two arms after the time in which the cheaper one makes all of its steps."""
    end = steps * min(costs[arm], costs[other])
    means, deviations = [], []
    for name in (arm, other):
        by_rate: dict[float, list[float]] = {}
        for row in rows:
            if row["arm"] == name:
                by_rate.setdefault(row["lr"], []).append(loss_after(row, end / costs[name]))
        best = min(by_rate.values(), key=statistics.fmean)
        means.append(statistics.fmean(best))
        deviations.append(spread(best) or 0.0)
    return Pair(means[0], means[1], max(deviations))


def measure_in_equal_time(
    arguments: Namespace,
    arms: dict[str, Arm],
    rates: Sequence[float],
    seeds: int,
    shared: dict[str, Any],
    file: str,
    judge: Callable[[list[dict[str, Any]], dict[str, float]], tuple[Verdict, str]],
) -> Findings:
    """Train all arms at all rates with all seeds; `judge` decides from rows and costs of a step."""
    shared = {**shared, "data": str(Path(arguments.data) / file)}
    rows = run_arms(arguments, arms, rates, seeds, shared)
    costs = seconds_per_step(arguments, arms, shared)
    ended = [row for row in rows if row["status"] in ENDED]
    verdict, why = judge(ended, costs)
    return Findings(
        numbers=[*table_of(rows, list(arms)), *rows_of_costs(costs)] if ended else [],
        verdict=verdict,
        why=why,
        runs=kept(rows),
        seeds=list(range(seeds)),
        cpu_hours=cpu_hours(rows),
        draw=(lambda ax: over_time(ended, costs, ax)) if ended else None,
        columns=("validation loss (nats)", "deviation"),
    )


def over_time(rows: list[dict[str, Any]], costs: dict[str, float], ax: Any) -> None:
    """Draw the validation loss of every arm over CPU time, for the rate that ends best."""
    for number, (arm, seconds) in enumerate(costs.items()):
        by_rate: dict[float, list[dict[str, Any]]] = {}
        for row in rows:
            if row["arm"] == arm:
                by_rate.setdefault(row["lr"], []).append(row)
        if not by_rate:
            continue
        best = min(
            by_rate.values(),
            key=lambda own: statistics.fmean(loss_after(row, math.inf) for row in own),
        )
        for place, row in enumerate(row for row in best if row["curve"]):
            steps, losses = zip(*row["curve"], strict=True)
            times = [step * seconds for step in steps]
            ax.plot(times, losses, color=f"C{number}", label=None if place else arm)
    ax.set(xlabel="CPU time (seconds)", ylabel="validation loss (nats)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small")


def rows_of_costs(costs: dict[str, float]) -> list[dict[str, Any]]:
    """Return the lines of the table that say what a step costs."""
    setting = "CPU milliseconds of a step"
    return [summary(arm, setting, [1000 * seconds]) for arm, seconds in costs.items()]
