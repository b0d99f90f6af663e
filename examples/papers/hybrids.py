"""Is there a better hybrid than attention first and consensus last, at equal cost?"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from consensus_text_causal import FILE
from consensus_text_causal import SHARED as CAUSAL
from controls import with_blocks
from costs import at_equal_cost, measure_in_equal_time
from evidence import Experiment, Findings, Verdict, main
from rates import Arm, config_of, losses_at
from sweep_claims import OPTIONS

RATES = (1e-3, 3.162e-3)
SEEDS = 3
SHARED = {**CAUSAL, "evaluate_every": 50}
STEPS = SHARED["steps"]
KRAUSE = {"top_k": 16, "init_sigma": 2.5}
BLOCKS: dict[str, dict[str, Any]] = {  # hybrids without a name in the library
    "linear, then krause": {
        "mixer": [*["linear"] * 3, "krause"],
        "window": [None, None, None, 32],
        "options": KRAUSE,
    },
    "windows, then krause": {
        "mixer": [*["dot-window"] * 3, "krause"],
        "window": [3, 3, 3, 32],
        "options": {"top_k": [None, None, None, 16], "init_sigma": 2.5},
    },
}
ARMS = {
    "mix": Arm("mix", OPTIONS),
    "gka, then consensus": Arm("gka-consensus", OPTIONS),
    "krause without projections": Arm("gka", {"top_k": 16}, window=32),
    **{name: Arm("dot", change=partial(with_blocks, **own)) for name, own in BLOCKS.items()},
    "windows": Arm("dot-window", window=3),
}
HYBRIDS = list(ARMS)[1:-1]

EXPERIMENT = Experiment(
    name="hybrids",
    title="Hybrids of mechanisms, beside attention and then consensus",
    paper="no paper; the hybrid of Stabilizing Transformer Training Through Consensus (MIX) is the "
    "baseline",
    claim="Some hybrid of the mechanisms of the papers has a lower loss than MIX (attention in the "
    "first half of the blocks, consensus in the second) at equal cost.",
    prediction="After the CPU time in which the cheaper of the two makes its 600 steps, each at "
    "its better rate of two, the mean validation loss of at least one of four hybrids is below "
    "that of MIX by more than two standard deviations (the larger of the two arms', over seeds). "
    "The hybrids are: Gaussian kernels and then consensus; Krause attention without projections in "
    "all blocks; linear attention with Krause attention in the last block; windows of three tokens "
    "with Krause attention in the last block. We expect this of the last only, because windows of "
    "three tokens alone were better than MIX in consensus_text_causal, and we expect it to be no "
    "more than two standard deviations below windows alone.",
    refuted_if="No hybrid below MIX by more than two standard deviations.",
    config={
        **config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
        "blocks": BLOCKS,
    },
    notes="The models are those of consensus_text_causal: 4 blocks of width 64, 158 to 218 "
    "thousand parameters, 600 steps. Models with Gaussian kernels have fewer parameters, because "
    "these have no projections. The last third of 4 blocks is one block. Krause attention sees 32 "
    "tokens and keeps 16. Rates are constant from the first step, so that a curve can be read at "
    "any time; all arms choose the better of the same two rates, of which the higher was the best "
    "of attention, MIX and windows in consensus_text_causal, on the text that also compares them. "
    "A step's cost is the least CPU time of one thread over 15 steps, measured in turns; it "
    "depends on the machine and on the library. Four hybrids are four attempts: a difference just "
    "beyond two deviations of three seeds may be chance. Windows alone are no hybrid, so they "
    "decide nothing, but they show how much of a result is due to windows.",
)


def judged(rows: list[dict[str, Any]], costs: dict[str, float]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, arm, lr)) for arm in ARMS for lr in RATES]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(counts)} runs are done."
    parts, better = [], []
    for arm in (*HYBRIDS, "windows"):
        pair = at_equal_cost(rows, costs, arm, "mix", STEPS)
        gain = pair.other - pair.loss
        parts.append(f"{arm} {-gain:+.3f} (deviation {pair.deviation:.3f})")
        if arm in HYBRIDS and gain > 2 * pair.deviation:
            better.append(arm)
    why = f"Loss at equal CPU time, minus that of MIX: {', '.join(parts)}."
    beside = []
    for arm in better:
        pair = at_equal_cost(rows, costs, arm, "windows", STEPS)
        beside.append(f"{arm} {pair.loss - pair.other:+.3f} (deviation {pair.deviation:.3f})")
    if beside:
        return "held", f"{why} Minus that of windows alone: {', '.join(beside)}."
    return "not held", why


def measure(arguments: Namespace) -> Findings:
    return measure_in_equal_time(arguments, ARMS, RATES, SEEDS, SHARED, FILE, judged)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
