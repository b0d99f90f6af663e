"""Is a language model without projections almost as good in the same time?"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from costs import at_equal_cost, measure_in_equal_time
from evidence import Experiment, Findings, Verdict, main
from rates import (
    Arm,
    best_rate,
    config_of,
    losses_at,
    means,
)

RATES = (1e-3, 3.162e-3)
SEEDS, STEPS = 3, 1300
CLOSE = 1.05
WINDOW = [128, 256]  # short, long
OPTIONS: dict[str, Any] = {
    "dim": 64,
    "depth": 4,
    "heads": 2,
    "window_pattern": "SSSL",
    "norm": "rms",
    "norm_affine": False,
    "activation": "relu2",
    "bias": False,
    "tie_weights": False,
}
NANOCHAT = {**OPTIONS, "value_embeddings": True, "logit_softcap": 15.0}
ARMS = {
    "dot": Arm("dot", {"qk_norm": True}, window=WINDOW),
    "gka": Arm("gka", {"normalize": True}, window=WINDOW),
    "nanochat": Arm("dot", {"qk_norm": True}, WINDOW, config={"model_options": NANOCHAT}),
}
FILE = "text/tinyshakespeare.txt"
SHARED: dict[str, Any] = {
    "kind": "text",
    "tokenizer": "characters",
    "length": 256,
    "model": "text-1m",
    "model_options": OPTIONS,
    "objective": "causal",
    "steps": STEPS,
    "batch_tokens": 1536,
    "warmup_steps": 50,
    "weight_decay": 0.0,
    "validation_tokens": 32768,
    "evaluate_every": 50,
    "save_every": 100,
}

EXPERIMENT = Experiment(
    name="gka_language",
    title="A language model without projections, in equal time",
    paper="Projection-Free Transformers via Gaussian Kernel Attention, Table 6",
    claim="A language model with Gaussian kernel attention (GKA) has 0.8191 bits per byte, 3.9 % "
    "more than the 0.7884 of nanochat's attention, after 0.49 times the operations. The paper asks "
    "for a comparison at equal compute.",
    prediction="After the CPU time in which the cheaper of the two arms makes its 1,300 steps, the "
    "mean bits per byte of GKA on the validation text are at most 1.05 times those of 'dot', the "
    "same model with attention, each at its better rate of two.",
    refuted_if="More than 1.05 times those of 'dot' by more than two standard deviations (the "
    "larger of the two arms', over seeds). If the difference to 1.05 times is smaller than that, "
    "on either side, it is inconclusive.",
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="The paper's models have 20 blocks and 378 and 896 million parameters. These have 4 "
    "blocks of width 64 and 0.16 to 0.21 million, and the windows SSSL of the paper (short ones of "
    "128, one long one of 256 characters). Both have rotary positions and norms of the heads' "
    "queries and keys. 'nanochat' is attention with what the paper's baseline has beside that, "
    "value embeddings and a softcap of the logits; it decides nothing. A character of this text is "
    "one byte, so bits per byte are the loss in nats divided by ln 2. The rate is constant after "
    "50 steps, so that a curve can be read at any time; both arms choose the better of the same "
    "two rates on the text that also compares them. A step's cost is the least CPU time of one "
    "thread over 15 steps, measured in turns. Between evaluations, every 50 steps, losses are "
    "interpolated.",
)  # fmt: skip


def bits(nats: float) -> float:
    """Return bits per byte from nats per character; a character is one byte."""
    return nats / math.log(2)


def judged(rows: list[dict[str, Any]], costs: dict[str, float]) -> tuple[Verdict, str]:
    counts = [len(losses_at(rows, arm, lr)) for arm in ("dot", "gka") for lr in RATES]
    if min(counts) < SEEDS:
        return "open", f"{sum(counts)} of {SEEDS * len(counts)} runs of dot and GKA are done."
    pair = at_equal_cost(rows, costs, "gka", "dot", STEPS)
    steps = {arm: min(means(rows, arm).values()) for arm in ("gka", "dot")}
    why = (
        f"Bits per byte at equal CPU time: GKA {bits(pair.loss):.3f}, dot {bits(pair.other):.3f}, "
        f"ratio {pair.loss / pair.other:.3f} (deviation {bits(pair.deviation):.3f} bits). At equal "
        f"steps the ratio is {steps['gka'] / steps['dot']:.3f}, and a step of GKA takes "
        f"{costs['gka'] / costs['dot']:.2f} of the time. Rates: GKA {best_rate(rows, 'gka'):g}, "
        f"dot {best_rate(rows, 'dot'):g}."
    )
    beyond = pair.loss - CLOSE * pair.other
    if not abs(beyond) > 2 * pair.deviation:
        return "inconclusive", why
    return ("held" if beyond < 0 else "not held"), why


def measure(arguments: Namespace) -> Findings:
    found = measure_in_equal_time(arguments, ARMS, RATES, SEEDS, SHARED, FILE, judged)
    for line in found.numbers:
        if line["setting"].startswith("lr"):
            line["mean"], line["spread"] = (
                None if value is None else bits(value) for value in (line["mean"], line["spread"])
            )
    found.columns = ("bits per byte", "deviation")
    return found


if __name__ == "__main__":
    main(EXPERIMENT, measure)
