"""Is consensus robust to a learning rate that is too high? Text, from left to right."""

from __future__ import annotations

from evidence import Experiment
from rates import SMALL, Arm, config_of
from sweep_claims import CLAIM, OPTIONS, PREDICTION, TRAINING, refuted, run_sweeps

RATES = (1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 3
TOO_LITTLE = 0.1
ARMS = {
    "sa": Arm("dot"),
    "sc": Arm("consensus", OPTIONS),
    "mix": Arm("mix", OPTIONS),
    "sw": Arm("dot-window", window=3),
}
FILE = "text/tinyshakespeare.txt"
SHARED = {
    **TRAINING,
    "kind": "text",
    "tokenizer": "characters",
    "model": "text-1m",
    "model_options": {**SMALL, "consensus_window": 3, "tie_weights": False},
    "objective": "causal",
    "validation_tokens": 32768,
}

EXPERIMENT = Experiment(
    name="consensus_text_causal",
    title="Consensus and high learning rates: text, from left to right",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 2",
    claim=CLAIM,
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "1.1 MB of Shakespeare's plays"),
    notes="The paper's smallest text model has 54 million parameters and trains for 5,000 steps "
    "of 512 sequences of 1,024 tokens, with diffusion. This one has 0.2 million parameters and "
    "sees 600 batches of 16 windows of 128 characters. Tokens see earlier tokens only: a window "
    "of 2 means the two tokens before. Two things beside the prediction, seen afterwards. MIX "
    "passes by little: it rises by 96 % of what SA rises (at rate 0.03162 it is 0.3 nats better "
    "than SA, at 0.1 no longer). SW, which sees three tokens, has the best loss of all, so this "
    "text at this length does not show what attention to far tokens is good for.",
)


if __name__ == "__main__":
    run_sweeps(EXPERIMENT, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)
