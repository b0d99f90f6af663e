"""Is consensus robust to a learning rate that is too high? Text, by diffusion."""

from __future__ import annotations

from evidence import Experiment
from rates import config_of
from sweep_claims import ARMS_OF_ENCODERS, CLAIM, PREDICTION, TRAINING, refuted, run_sweeps

RATES = (1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 3
TOO_LITTLE = 0.1
ARMS = ARMS_OF_ENCODERS
FILE = "text/tinyshakespeare.txt"
SHARED = {
    **TRAINING,
    "kind": "text",
    "tokenizer": "characters",
    "model": "encoder-1m",
    "objective": "diffusion",
    "objective_options": {"noise": "geometric"},
    "validation_tokens": 32768,
}

EXPERIMENT = Experiment(
    name="consensus_text_diffusion",
    title="Consensus and high learning rates: text, by diffusion",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 2",
    claim=CLAIM,
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="The paper's smallest text model has 54 million parameters and trains for 5,000 steps "
    "of 512 sequences of 1,024 tokens. This one has 0.2 million parameters and sees 600 batches "
    "of 16 windows of 128 characters. Both train by absorbing diffusion (score entropy).",
)


if __name__ == "__main__":
    run_sweeps(EXPERIMENT, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)
