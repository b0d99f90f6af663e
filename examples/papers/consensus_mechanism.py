"""Does a layer that stays a low-pass filter tolerate larger learning rates?"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from consensus_stable_rates import batches_of, medians
from consensus_text_diffusion import FILE, SHARED
from evidence import Experiment, Findings, Verdict, main
from rates import PAPERS_OPTIMIZER, Arm, cpu_hours, curves, kept, run_arms, table_of, widths_of
from scipy.stats import spearmanr
from sweep_claims import OPTIONS

import graphattn as ga
from graphattn.nn.files import pretrained
from graphattn.train.runs.checkpoints import checkpoint_path

RATES = (1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS, STEP = 2, 600
LOWEST = "1 - 2 eta lambda_max"
ROTATED = {**SHARED["model_options"], "rope": "isometric"}
ARMS = {
    "Eq. 42, step 0.1": Arm("consensus", OPTIONS, window=2),
    "isometric, step 0.1": Arm(
        "consensus", OPTIONS, window=2, config={"model_options": ROTATED}
    ),
    "isometric, automatic step": Arm(
        "consensus", {**OPTIONS, "step_size": "auto"}, window=2,
        config={"model_options": ROTATED},
    ),
}  # fmt: skip

EXPERIMENT = Experiment(
    name="consensus_mechanism",
    title="Is the low-pass filter the reason?",
    paper="Stabilizing Transformer Training Through Consensus, Sections 2.2 and 5.2",
    claim="Consensus stabilises training because every layer is a low-pass filter of its input, "
    "that is, no factor 1 - 2 eta lambda of its step is negative.",
    prediction="Over the trained models with isometric rotations (for which the factors are those "
    "of a gradient step), the rank correlation between the lowest factor 1 - 2 eta lambda_max of "
    "a model's layers and its median alpha_max, divided by the learning rate, is above 0.5.",
    refuted_if="A rank correlation of at most 0.2. Between 0.2 and 0.5 it is inconclusive.",
    config={
        "arms": {name: {**arm.options, **arm.config} for name, arm in ARMS.items()},
        "rates": RATES,
        **PAPERS_OPTIMIZER,
        **SHARED,
        "files": {FILE: "1.1 MB of Shakespeare's plays"},
    },
    notes="A correlation over learning rates is not a cause: both numbers may follow the rate. "
    "The loss of the arms at the same rate is the other half of the answer. The paper's rotation "
    "(Eq. 42) has no factor of this kind, so that arm has a loss only.",
)


def lowest_factor(model: Any, objective: ga.train.Objective, batch: Any) -> float:
    """Return the smallest 1 - 2 eta lambda_max of the layers of a model."""
    state = ga.train.layer_state(model, objective, [batch])
    return min(layer[LOWEST] for layer in state["layers"].values())


def judged(pairs: list[tuple[float, float]], done: int, planned: int) -> tuple[Verdict, str]:
    if done < planned:
        return "open", f"{done} of {planned} runs with isometric rotations are done."
    correlation = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    why = (
        f"Rank correlation {correlation:.2f} over {len(pairs)} models. The lowest factor is "
        f"{min(x for x, _ in pairs):.3g} to {max(x for x, _ in pairs):.3g}."
    )
    if correlation > 0.5:
        return "held", why
    return ("not held" if correlation <= 0.2 else "inconclusive"), why


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    data = Path(arguments.data) / FILE
    rows = run_arms(arguments, ARMS, RATES, SEEDS, {**SHARED, "data": str(data)})
    runs, pairs = kept(rows), []
    done = [row for row in rows if row["status"] in ("finished", "diverged")]
    objective: Any = None
    for row, run in zip(done, runs, strict=True):
        folder = Path(arguments.work) / row["arm"] / row["folder"]
        checkpoint = checkpoint_path(folder, STEP)
        if not row["arm"].startswith("isometric") or not checkpoint.is_dir():
            continue
        if objective is None:
            objective, batches = batches_of(data, folder)
        run["factor"] = lowest_factor(pretrained.load(checkpoint).eval(), objective, batches[0])
        run["alpha_max"], _ = medians(folder, STEP, row["lr"], objective, batches)["running mean"]
        if math.isfinite(run["alpha_max"]):
            pairs.append((run["factor"], run["alpha_max"] / row["lr"]))
    numbers = [*table_of(rows, list(ARMS)), *widths_of(rows, tolerance=0.1)]
    for arm in ARMS:
        own = [run["factor"] for run in runs if run["arm"] == arm and "factor" in run]
        if own:
            numbers.append(
                {
                    "mechanism": arm,
                    "setting": f"lowest {LOWEST}, all rates",
                    "mean": statistics.fmean(own),
                    "spread": f"{min(own):.3g} to {max(own):.3g}",
                    "seeds": SEEDS,
                }
            )
    isometric = sum(row["arm"].startswith("isometric") for row in done)
    verdict, why = judged(pairs, isometric, 2 * len(RATES) * SEEDS)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=lambda ax: curves(rows, ax),
        columns=("validation loss (nats)", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
