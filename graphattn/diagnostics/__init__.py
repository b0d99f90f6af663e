"""Measurements of models: attention, hidden states, stable learning rates and costs.

::

    with ga.diagnostics.record_attention(model) as layers:  # weights of graphattn's layers
        model(tokens)
    with ga.diagnostics.record(model) as recording:         # attention of any model
        model(tokens)
    recording.sinks(), recording.rollout()
    ga.diagnostics.hidden_spectra(model, tokens)            # eigenvalues of the hidden states
    ga.diagnostics.sink_share(layers[0].weights, layers[0].graph)  # attention on token 0
    ga.diagnostics.bandwidths(model)                               # learned sigma per head
    ga.diagnostics.max_stable_lr(model, loss_fn, optimizer, batches)
    ga.diagnostics.flops(model, tokens)                            # operations per forward pass
"""

from graphattn.diagnostics.attention.record import (
    AttentionRecord,
    record_attention,
    sinks_per_layer,
)
from graphattn.diagnostics.attention.recording import Recording, record
from graphattn.diagnostics.attention.rollout import rollout
from graphattn.diagnostics.attention.statistics import (
    attention_entropy,
    head_diversity,
    sink_share,
)
from graphattn.diagnostics.bandwidths import bandwidths
from graphattn.diagnostics.cost import (
    TrainingOperations,
    activation_memory,
    flops,
    training_operations,
)
from graphattn.diagnostics.hidden.effective_rank import effective_rank, effective_rank_per_layer
from graphattn.diagnostics.hidden.spectra import (
    HiddenSpectra,
    hidden_spectra,
    spectra_without_attention,
)
from graphattn.diagnostics.per_layer import PerLayer
from graphattn.diagnostics.stable_lr import StableLearningRate, max_stable_lr

__all__ = [
    "AttentionRecord",
    "HiddenSpectra",
    "PerLayer",
    "Recording",
    "StableLearningRate",
    "TrainingOperations",
    "activation_memory",
    "attention_entropy",
    "bandwidths",
    "effective_rank",
    "effective_rank_per_layer",
    "flops",
    "head_diversity",
    "hidden_spectra",
    "max_stable_lr",
    "record",
    "record_attention",
    "rollout",
    "sink_share",
    "sinks_per_layer",
    "spectra_without_attention",
    "training_operations",
]
