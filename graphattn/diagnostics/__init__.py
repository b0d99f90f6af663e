"""Looking into a model: where it attends, how its layers differ, how large a step it bears.

::

    with ga.diagnostics.record_attention(model) as layers:  # weights of every layer
        model(tokens)
    ga.diagnostics.sink_share(layers[0].weights, layers[0].graph)  # attention on token 0
    ga.diagnostics.bandwidths(model)                               # learned sigma per head
    ga.diagnostics.max_stable_lr(model, loss_fn, optimizer, batches)
"""

from graphattn.diagnostics.attention_statistics import (
    attention_entropy,
    head_diversity,
    sink_share,
)
from graphattn.diagnostics.bandwidths import bandwidths
from graphattn.diagnostics.effective_rank import effective_rank, effective_rank_per_layer
from graphattn.diagnostics.per_layer import PerLayer
from graphattn.diagnostics.record import AttentionRecord, record_attention, sinks_per_layer
from graphattn.diagnostics.rollout import rollout
from graphattn.diagnostics.stable_learning_rate import StableLearningRate, max_stable_lr

__all__ = [
    "AttentionRecord",
    "PerLayer",
    "StableLearningRate",
    "attention_entropy",
    "bandwidths",
    "effective_rank",
    "effective_rank_per_layer",
    "head_diversity",
    "max_stable_lr",
    "record_attention",
    "rollout",
    "sink_share",
    "sinks_per_layer",
]
