"""Which parameters weight decay may shrink."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphattn.nn.edge_network import EdgeNetwork


def parameter_groups(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups for an optimizer: weights of maps, which decay, and the rest, which does not.

    Decay pulls towards 0. That is a prior for the weights of linear maps and convolutions, and
    none for biases, norms, embeddings, class tokens, step sizes (``raw_step_size``) and bandwidths
    (GKA paper, Section 4.1): a ``log_sigma`` of 0 would be sigma = 1, where attention by distance
    is nearly the identity. A map is a parameter of two or more dimensions whose name ends in
    "weight" and that is no embedding, or one of an edge network's.

    Args:
        model: any module; a parameter used in two places counts once.
        weight_decay: of the first group (the consensus paper trains with AdamW's 0.01).

    Returns:
        Two dicts with "params" and "weight_decay", of the parameters that require gradients.

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
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    embeddings: set[int] = set()
    edge_networks: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
        elif isinstance(module, EdgeNetwork):
            edge_networks |= {id(p) for p in (module.alpha, module.beta, module.shear)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_weight = name.endswith("weight") and id(parameter) not in embeddings
        is_map = parameter.dim() > 1 and (is_weight or id(parameter) in edge_networks)
        (decays if is_map else stays).append(parameter)
    return [
        {"params": decays, "weight_decay": weight_decay},
        {"params": stays, "weight_decay": 0.0},
    ]
