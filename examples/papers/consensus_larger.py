"""Does what a small model shows about high learning rates hold for one that is 24 times larger?"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from consensus_text_causal import FILE, SHARED
from evidence import Experiment, Findings, Verdict, main
from rates import Arm, config_of, losses_at, means, measure_arms
from sweep_claims import OPTIONS

RATES = (1e-3, 1e-2)
SIZE = {"dim": 256, "depth": 6, "heads": 4}
ARMS = {"sa": Arm("dot"), "sc": Arm("consensus", OPTIONS), "mix": Arm("mix", OPTIONS)}
OF_SIZE = {**SHARED, "model_options": {**SHARED["model_options"], **SIZE}, "steps": 300}
TOO_LITTLE = 0.1

EXPERIMENT = Experiment(
    name="consensus_larger",
    title="High learning rates in a larger model",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1, Tables 2 to 4",
    claim="The stability and performance benefits persist as model size increases.",
    prediction="With 4.8 million parameters, the loss at rate 0.01 minus the loss at 0.001 is "
    "smaller for SC than for SA, and smaller for MIX than for SA.",
    refuted_if="A difference of SC or of MIX that is at least that of SA. If SA is not 0.1 nats "
    "worse at 0.01, it is inconclusive.",
    config=config_of(ARMS, RATES, OF_SIZE, FILE, "1.1 MB of Shakespeare's plays"),
    notes="One seed and two rates. 300 steps, half of those of the small model.",
)


def judged(rows: list[dict[str, Any]]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, arm, lr)) for arm in ARMS for lr in RATES]
    if min(counts) < 1:
        return "open", f"{sum(counts)} of {len(counts)} runs are done."
    worse = {arm: means(rows, arm)[RATES[1]] - means(rows, arm)[RATES[0]] for arm in ARMS}
    why = "Loss at 0.01 minus loss at 0.001: " + ", ".join(
        f"{arm.upper()} {value:+.3f}" for arm, value in worse.items()
    )
    if worse["sa"] < TOO_LITTLE:
        return "inconclusive", f"{why}."
    both = max(worse["sc"], worse["mix"]) < worse["sa"]
    return ("held" if both else "not held"), f"{why}."


def measure(arguments: Namespace) -> Findings:
    return measure_arms(arguments, ARMS, RATES, 1, OF_SIZE, FILE, judged)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
