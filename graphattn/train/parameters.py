"""Which parameters weight decay may shrink."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two groups for an optimizer: weights of maps, which decay, and everything else, which not.

    Decay pulls towards 0. That is a prior for the weights of linear maps, and none for biases,
    norms, embeddings, step sizes (``raw_step_size``) and bandwidths: a ``log_sigma`` of 0 would be
    sigma = 1, where attention by distance is nearly the identity.

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
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.rsplit(".", 1)[-1]
        is_map = (
            parameter.dim() > 1 and not own.endswith("bias") and id(parameter) not in embeddings
        )
        (decays if is_map else stays).append(parameter)
    return [
        {"params": decays, "weight_decay": weight_decay},
        {"params": stays, "weight_decay": 0.0},
    ]
