"""Does the width of consensus' edge networks change how it bears a high learning rate?"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from consensus_text_causal import FILE, SHARED
from evidence import RESULTS, Experiment, Findings, Verdict, main
from rates import Arm, config_of, losses_at, means, measure_arms

RATES = (3.162e-3, 1e-1)  # where attention is best, and the highest of consensus_text_causal
SEEDS = 2
WIDE = {"edge_hidden": 256, "rank": 4}
ARMS = {"sc": Arm("consensus", WIDE), "mix": Arm("mix", WIDE)}

EXPERIMENT = Experiment(
    name="consensus_wide",
    title="Consensus with the edge networks of the paper",
    paper="Stabilizing Transformer Training Through Consensus, Sections 3.3 and 5.1",
    claim="The robustness of consensus to high learning rates is that of the paper's models, whose "
    "edge networks have 256 hidden units. The sweeps here use 32, which take half of the time.",
    prediction="From rate 0.003162 to 0.1, the mean loss of SC with 256 units rises by at most "
    "half of what SA rises in consensus_text_causal, and that of MIX with 256 units by less than "
    "what SA rises.",
    refuted_if="A larger rise of SC or MIX. A run that diverges counts as an infinite loss.",
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="Two rates and two seeds. The rise of SA, and those of SC and MIX with 32 units, come "
    "from the three seeds of consensus_text_causal.",
)


def raised(rows: list[dict[str, Any]], arm: str) -> float:
    by_rate = means(rows, arm)
    return by_rate[RATES[1]] - by_rate[RATES[0]]


def judged(rows: list[dict[str, Any]], narrow: list[dict[str, Any]]) -> tuple[Verdict, str]:
    """Return the verdict; `narrow` is the runs of consensus_text_causal."""
    counts = [len(losses_at(rows, arm, lr)) for arm in ARMS for lr in RATES]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(counts)} runs are done."
    sa, sc, mix = raised(narrow, "sa"), raised(rows, "sc"), raised(rows, "mix")
    why = (
        f"From rate 0.003162 to 0.1, SC rises by {sc:.3f} ({raised(narrow, 'sc'):.3f} with 32 "
        f"units), MIX by {mix:.3f} ({raised(narrow, 'mix'):.3f}), and SA by {sa:.3f}."
    )
    return ("held" if sc <= sa / 2 and mix < sa else "not held"), why


def measure(arguments: Namespace) -> Findings:
    record = json.loads((RESULTS / "consensus_text_causal.json").read_text(encoding="utf-8"))
    return measure_arms(
        arguments, ARMS, RATES, SEEDS, SHARED, FILE, lambda rows: judged(rows, record["runs"])
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
