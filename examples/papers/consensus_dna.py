"""Is consensus robust to a learning rate that is too high? DNA."""

from __future__ import annotations

from evidence import Experiment
from rates import config_of
from sweep_claims import ARMS_OF_ENCODERS, CLAIM, PREDICTION, TRAINING, refuted, run_sweeps

RATES = (1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 2
TOO_LITTLE = 0.005
ARMS = ARMS_OF_ENCODERS
FILE = "dna/ecoli_k12_GCF_000005845.2.fna.gz"
SHARED = {
    **TRAINING,
    "kind": "nucleotide",
    "model": "encoder-1m",
    "objective": "masked",
    "objective_options": {"schedule": "betalinear30"},
    "validation_tokens": 65536,
    "split": "position",
}

EXPERIMENT = Experiment(
    name="consensus_dna",
    title="Consensus and high learning rates: DNA",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 3",
    claim=CLAIM,
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "the genome of E. coli K-12, NC_000913.3"),
    notes="The paper trains 51 million parameters on OpenGenome for 5,000 steps. This one has 0.2 "
    "million parameters and sees 600 batches of 16 windows of 128 bases of one genome, of which "
    "the end is held out. The best loss is a few hundredths of a nat below log 4 = 1.386, so "
    "rises are small, too.",
)


if __name__ == "__main__":
    run_sweeps(EXPERIMENT, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)
