"""Does the authors' layer (two steps, learned step sizes) train as the paper's layer does?"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from consensus_text_diffusion import FILE, SHARED
from evidence import Experiment, Findings, Verdict, main
from rates import Arm, config_of, losses_at, means, measure_arms, spread
from sweep_claims import OPTIONS

RATES = (1e-3, 1e-2, 1e-1)
SEEDS = 3
PUBLISHED = {
    **OPTIONS,
    "iterations": 2,
    "learned_step": True,
    "share_alpha": True,
    "learned_beta": False,
    "edge_input": "full",
    "trunk": "separate",
}
ARMS = {
    "paper": Arm("consensus", OPTIONS, window=2),
    "published code": Arm("consensus", PUBLISHED, window=2),
}

EXPERIMENT = Experiment(
    name="consensus_published",
    title="The layer of the paper and the layer of its authors' code",
    paper="Stabilizing Transformer Training Through Consensus, Algorithm 2, and the code of "
    "Odyssey (Singhal et al., 2025)",
    claim="The paper describes one gradient step per layer, with a fixed size. The published code "
    "makes two steps of learned sizes, with one alpha for all heads, no beta, and an edge network "
    "that reads both tokens whole. If the results of the paper hold for its text, both train "
    "alike.",
    prediction="At each of the three rates, the mean losses of the two layers differ by at most "
    "two standard deviations over seeds (the larger of the two layers' deviations).",
    refuted_if="A larger difference at any of the three rates.",
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="The published code rotates the target alone and learns a step per position; see the "
    "page about the published code. The prediction says nothing about a rate at which both layers "
    "diverge. The first version of this page called such a rate a difference (infinity minus "
    "infinity), and so the result 'not held'; this was corrected after the runs.",
)


def judged(rows: list[dict[str, Any]]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, arm, lr)) for arm in ARMS for lr in RATES]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(counts)} runs are done."
    parts, agree, without = [], True, []
    for lr in RATES:
        a, b = (means(rows, arm)[lr] for arm in ARMS)
        if not math.isfinite(a) and not math.isfinite(b):
            without.append(f"{lr:g}")
            continue
        deviation = max(spread(losses_at(rows, arm, lr)) or 0.0 for arm in ARMS)
        agree = agree and abs(b - a) <= 2 * deviation
        parts.append(f"{b - a:+.3f} at {lr:g} (deviation {deviation:.3f})")
    why = f"Loss of the published layer minus that of the paper's: {', '.join(parts)}."
    if without:
        why += (
            f" Both layers diverge at {' and '.join(without)}, so no losses can be compared there."
        )
    if not agree:
        return "not held", why
    return ("inconclusive" if without else "held"), why


def measure(arguments: Namespace) -> Findings:
    return measure_arms(arguments, ARMS, RATES, SEEDS, SHARED, FILE, judged)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
