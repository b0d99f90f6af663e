"""Is consensus robust to a learning rate that is too high? Proteins."""

from __future__ import annotations

from evidence import Experiment
from rates import config_of
from sweep_claims import ARMS_OF_ENCODERS, CLAIM, PREDICTION, TRAINING, refuted, run_sweeps

RATES = (1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 2
TOO_LITTLE = 0.02
ARMS = ARMS_OF_ENCODERS
FILE = "protein/sprot_archaea.fasta"
SHARED = {
    **TRAINING,
    "kind": "protein",
    "model": "encoder-1m",
    "objective": "masked",
    "objective_options": {"schedule": "betalinear30"},
    "validation_tokens": 65536,
}

EXPERIMENT = Experiment(
    name="consensus_protein",
    title="Consensus and high learning rates: proteins",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 4",
    claim=CLAIM,
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "proteins of archaea in Swiss-Prot"),
    notes="The paper trains 35 million parameters on sequences and structures for 3,000 steps. "
    "This one has 0.2 million parameters, reads sequences alone, and sees 600 batches of 2,048 "
    "residues. The best loss is some hundredths of a nat below the entropy of the residues' "
    "frequencies, so rises are small, too.",
)


if __name__ == "__main__":
    run_sweeps(EXPERIMENT, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)
