"""Parameter groups with and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphattn.graphs.arguments import as_float
from graphattn.nn.edges.network import EdgeNetwork

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_EXEMPT = (nn.Embedding, nn.EmbeddingBag, *_NORMS)


def parameter_groups(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: weights of maps with decay, all others without.

    Weight decay pulls parameters towards 0. That makes sense for the weights of linear maps and
    convolutions, but not for biases, norms, embeddings, class tokens, step sizes
    (``raw_step_size``), attention sinks and bandwidths (GKA paper, Section 4.1). For instance, a
    ``log_sigma`` of 0 means sigma = 1, where attention by distance is nearly the identity. A
    parameter counts as a weight of a map if it has two or more dimensions, is named a weight, and
    does not belong to an embedding or norm; or if it belongs to an edge network.

    Args:
        model: any module; a parameter that is used twice counts once.
        weight_decay: weight decay of the first group (the consensus paper uses AdamW's 0.01).

    Returns:
        Two dicts with "params" and "weight_decay", for the parameters that require gradients.

    Example:
        >>> import torch, graphattn as ga
        >>> layer = ga.nn.GaussianKernelAttention(16, heads=4)
        >>> decay, free = ga.train.parameter_groups(layer)
        >>> [tuple(p.shape) for p in decay["params"]]  # output_proj.weight
        [(16, 16)]
        >>> [tuple(p.shape) for p in free["params"]]  # log_sigma and output_proj.bias
        [(4,), (16,)]
        >>> optimizer = torch.optim.AdamW([decay, free], lr=1e-3)
    """
    weight_decay = as_float("weight_decay", weight_decay, positive=False)
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    edge_networks: set[int] = set()
    exempt: set[int] = set()
    for module in model.modules():
        if isinstance(module, EdgeNetwork):
            edge_networks |= {id(p) for p in (module.alpha, module.beta, module.shear)}
        elif isinstance(module, _EXEMPT):
            exempt |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_weight = "weight" in name.rsplit(".", 1)[-1] and id(parameter) not in exempt
        is_map = parameter.dim() > 1 and (is_weight or id(parameter) in edge_networks)
        (decays if is_map else stays).append(parameter)
    return [
        {"params": decays, "weight_decay": weight_decay},
        {"params": stays, "weight_decay": 0.0},
    ]
