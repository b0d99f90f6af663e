"""Is consensus robust to a learning rate that is too high? Text, by diffusion."""

from __future__ import annotations

from argparse import Namespace

from evidence import Experiment, Findings, main
from rates import SMALL, Arm
from sweep_claims import OPTIONS, PREDICTION, config_of, measure_sweep, refuted

RATES = (1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 3
TOO_LITTLE = 0.1
ARMS = {
    "sa": Arm("dot", window=2),
    "sc": Arm("consensus", OPTIONS, window=2),
    "mix": Arm("mix", OPTIONS, window=2),
    "sw": Arm("dot-window", window=2),
}
FILE = "text/tinyshakespeare.txt"
SHARED = {
    "kind": "text",
    "tokenizer": "characters",
    "length": 128,
    "model": "encoder-1m",
    "model_options": SMALL,
    "objective": "diffusion",
    "objective_options": {"noise": "geometric"},
    "steps": 600,
    "batch_tokens": 2048,
    "evaluate_every": 200,
    "save_every": 100,
    "keep": 6,
    "validation_tokens": 32768,
}

EXPERIMENT = Experiment(
    name="consensus_text_diffusion",
    title="Consensus and high learning rates: text, by diffusion",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 2",
    claim="As the learning rate is increased beyond the band used in practice, self-attention "
    "(SA) and sliding-window attention (SW) incur sharp degradation, whereas self-consensus (SC) "
    "degrades more gradually. MIX (attention in the first half of the layers, consensus in the "
    "second) mirrors SA at the best rate and is less sensitive.",
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="The paper's smallest text model has 54 million parameters and trains for 5,000 steps "
    "of 512 sequences of 1,024 tokens. This one has 0.2 million parameters and sees 600 batches "
    "of 16 windows of 128 characters. Both train by absorbing diffusion (score entropy).",
)


def measure(arguments: Namespace) -> Findings:
    return measure_sweep(arguments, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
