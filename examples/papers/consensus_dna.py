"""Is consensus robust to a learning rate that is too high? DNA."""

from __future__ import annotations

from argparse import Namespace

from evidence import Experiment, Findings, main
from rates import SMALL, Arm
from sweep_claims import OPTIONS, PREDICTION, config_of, measure_sweep, refuted

RATES = (1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1)
SEEDS = 2
TOO_LITTLE = 0.005
ARMS = {
    "sa": Arm("dot", window=2),
    "sc": Arm("consensus", OPTIONS, window=2),
    "mix": Arm("mix", OPTIONS, window=2),
    "sw": Arm("dot-window", window=2),
}
FILE = "dna/ecoli_k12_GCF_000005845.2.fna.gz"
SHARED = {
    "kind": "nucleotide",
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
    "split": "position",
}

EXPERIMENT = Experiment(
    name="consensus_dna",
    title="Consensus and high learning rates: DNA",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 and Figure 3",
    claim="As the learning rate is increased beyond the band used in practice, self-attention "
    "(SA) and sliding-window attention (SW) incur sharp degradation, whereas self-consensus (SC) "
    "degrades more gradually. MIX (attention in the first half of the layers, consensus in the "
    "second) mirrors SA at the best rate and is less sensitive.",
    prediction=PREDICTION,
    refuted_if=refuted(TOO_LITTLE),
    config=config_of(ARMS, RATES, SHARED, FILE, "the genome of E. coli K-12, NC_000913.3"),
    notes="The paper trains 51 million parameters on OpenGenome for 5,000 steps. This one has 0.2 "
    "million parameters and sees 600 batches of 16 windows of 128 bases of one genome, of which "
    "the end is held out. The best loss is a few hundredths of a nat below log 4 = 1.386, so "
    "rises are small, too.",
)


def measure(arguments: Namespace) -> Findings:
    return measure_sweep(arguments, ARMS, RATES, SEEDS, SHARED, FILE, TOO_LITTLE)


if __name__ == "__main__":
    main(EXPERIMENT, measure)
