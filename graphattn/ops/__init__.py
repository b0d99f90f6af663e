"""The mathematics as pure functions of tensors and a graph."""

from graphattn.near_names import explain_functions
from graphattn.ops.attention.api import (
    attention_weights,
    dot_product_attention,
    rbf_attention,
    score_attention,
)
from graphattn.ops.attention.candidates import (
    attend_candidates,
    merge_top_k,
    top_k_candidates,
)
from graphattn.ops.attention.logits.score import DotProduct, GaussianKernel, Score
from graphattn.ops.attention.merge import merge_attention
from graphattn.ops.attention.step.decode import decode_attention
from graphattn.ops.backends import use_backend
from graphattn.ops.consensus.api import consensus_edge_matrices, consensus_update
from graphattn.ops.consensus.edge_network import EdgeNetworkParameters, FirstLayer
from graphattn.ops.linear_attention.api import (
    elu_features,
    linear_attention,
    linear_attention_weights,
)
from graphattn.ops.linear_attention.rbf_features import nystrom_features, random_features
from graphattn.ops.support import backends

__all__ = [
    "DotProduct",
    "EdgeNetworkParameters",
    "FirstLayer",
    "GaussianKernel",
    "Score",
    "attend_candidates",
    "attention_weights",
    "backends",
    "consensus_edge_matrices",
    "consensus_update",
    "decode_attention",
    "dot_product_attention",
    "elu_features",
    "linear_attention",
    "linear_attention_weights",
    "merge_attention",
    "merge_top_k",
    "nystrom_features",
    "random_features",
    "rbf_attention",
    "score_attention",
    "top_k_candidates",
    "use_backend",
]

explain_functions(globals(), __all__)
