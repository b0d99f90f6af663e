"""Is consensus robust to a learning rate that is too high? Proteins."""

from __future__ import annotations

from argparse import Namespace

from evidence import Experiment, Findings, main
from rates import SMALL, Arm
from sweep_claims import OPTIONS, PREDICTION, config_of, measure_sweep, refuted

RATES = (1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 2
TOO_LITTLE = 0.02
ARMS = {
    "sa": Arm("dot", window=2),
    "sc": Arm("consensus", OPTIONS, window=2),
    "mix": Arm("mix", OPTIONS, window=2),
    "sw": Arm("dot-window", window=2),
}
FILE = "protein/sprot_archaea.fasta"
SHARED = {
    "kind": "protein",
    "length": 128,
    "model": "encoder-1m",
    "model_options": SMALL,
    "objective": "masked",
    "objective_options": {"schedule": "betalinear30"},
    "steps": 600,
    "batch_tokens": 2048,
    "evaluate_every": 200,
    "save_every": 100,
    "keep": 6,
    "validation_tokens": 65536,
}

EXPERIMENT = Experiment(
    name="consensus_protein",
    title="Consensus and high learning rates: proteins",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 4",
    claim="As the learning rate is increased beyond the band used in practice, self-attention "
    "(SA) and sliding-window attention (SW) incur sharp degradation, whereas self-consensus (SC) "
    "degrades more gradually. MIX (attention in the first half of the layers, consensus in the "
    "second) mirrors SA at the best rate and is less sensitive.",
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "proteins of archaea in Swiss-Prot"),
    notes="The paper trains 35 million parameters on sequences and structures for 3,000 steps. "
    "This one has 0.2 million parameters, reads sequences alone, and sees 600 batches of 2,048 "
    "residues. The best loss is some hundredths of a nat below the entropy of the residues' "
    "frequencies, so rises are small, too.",
)


def measure(arguments: Namespace) -> Findings:
    return measure_sweep(arguments, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
