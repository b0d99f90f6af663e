"""Window, rank and edge width of consensus: the largest gain of the three."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from consensus_text_diffusion import FILE, SHARED
from evidence import Experiment, Findings, Verdict, main
from rates import (
    PAPERS_OPTIMIZER,
    Arm,
    cpu_hours,
    kept,
    losses_at,
    means,
    run_arms,
    summary,
)

LR = 3.162e-3
SEEDS = 2
BASE = {"window": 2, "rank": 4, "edge_hidden": 32}
VALUES = {"window": (2, 4, 8, 12), "rank": (1, 4, 8, 16), "edge_hidden": (4, 16, 32, 64)}


def arm_of(name: str, value: int) -> tuple[str, Arm]:
    options = {**BASE, name: value}
    text = "base" if options == BASE else f"{name} {value}"
    return text, Arm("consensus", {k: v for k, v in options.items() if k != "window"},
                     window=options["window"])  # fmt: skip


ARMS = dict(arm_of(name, value) for name, values in VALUES.items() for value in values)

EXPERIMENT = Experiment(
    name="consensus_ablation",
    title="Window, rank and edge width of consensus",
    paper="Stabilizing Transformer Training Through Consensus, Appendix D.3 and Table 9",
    claim="Larger windows, ranks and edge networks all lower the loss; among the three, larger "
    "windows give the largest gain.",
    prediction="The mean validation loss falls more from the smallest to the largest window (2 to "
    "12) than from the smallest to the largest rank (1 to 16) and edge network (4 to 64).",
    refuted_if="A larger fall over the ranks or over the edge networks than over the windows.",
    config={
        "base": BASE,
        "values": VALUES,
        "lr": LR,
        **PAPERS_OPTIMIZER,
        **SHARED,
        "files": {FILE: "1.1 MB of Shakespeare's plays"},
    },
    notes="The paper ablates a model of 193 million parameters with edge networks of 4 to 256. "
    "This one has 0.2 million, and edge networks of 4 to 64. All runs have one learning rate.",
)


def judged(rows: list[dict[str, Any]]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, arm, LR)) for arm in ARMS]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(ARMS)} runs are done."
    falls = {}
    for name, values in VALUES.items():
        first, last = (means(rows, arm_of(name, value)[0])[LR] for value in (values[0], values[-1]))
        falls[name] = first - last
    why = "The loss changes by " + ", ".join(
        f"{-fall:+.3f} from {name} {VALUES[name][0]} to {VALUES[name][-1]}"
        for name, fall in falls.items()
    )
    gains_most = falls["window"] > max(falls["rank"], falls["edge_hidden"])
    return ("held" if gains_most else "not held"), f"{why}."


def measure(arguments: Namespace) -> Findings:
    shared = {**SHARED, "data": str(Path(arguments.data) / FILE)}
    rows = run_arms(arguments, ARMS, (LR,), SEEDS, shared)
    numbers = [
        summary("sc", f"{name} {value}", losses_at(rows, arm, LR))
        for name, values in VALUES.items()
        for value in values
        if LR in means(rows, arm := arm_of(name, value)[0])
    ]

    def draw(ax: Any) -> None:
        for name, values in VALUES.items():
            there = [v for v in values if LR in means(rows, arm_of(name, v)[0])]
            ratios = [v / values[0] for v in there]
            (line,) = ax.plot(ratios, [means(rows, arm_of(name, v)[0])[LR] for v in there], "o-",
                    label=f"{name} ({', '.join(map(str, values))})")  # fmt: skip
            for value, ratio in zip(there, ratios, strict=True):
                losses = losses_at(rows, arm_of(name, value)[0], LR)
                ax.plot([ratio] * len(losses), losses, ".", color=line.get_color(), alpha=0.4)
        ax.set(xscale="log", xlabel="value, divided by the smallest one",
               ylabel="validation loss (nats)")  # fmt: skip
        ax.legend()

    verdict, why = judged(rows)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=kept(rows),
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=draw,
        columns=("validation loss (nats)", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
