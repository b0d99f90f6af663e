"""The edge network as tensors: its two layers, features of edges, and the matrix of an edge.

The first layer acts on the two tokens of an edge, so it is applied once per token, and a sum of two
hidden vectors is that of an edge. Features of the edge itself add a third part, F e_ij. The second
layer makes alpha, beta and Lambda of R = alpha I + beta Lambda^T Lambda.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import clear_invalid_edges


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; without a call of torch if x has it, because such calls take time."""
    return x if x.dtype is dtype else x.to(dtype)


class FirstLayer(NamedTuple):
    """First layer of the edge network, ``weight y + bias`` per token and group of heads.

    Pass it in place of hidden vectors, which are several times as large as the tokens. A fused
    backend then computes them piece by piece, and again in the backward pass, and does not store
    them. As `edge_hidden`, its tokens are the features of edges, [*, E, 1, F], which all groups
    share; the hidden vectors of all edges are never in memory at once.

    Example:
        >>> import torch, graphattn as ga
        >>> y = torch.randn(10, 2, 8)  # tokens, groups, features
        >>> first = ga.FirstLayer(y, weight=torch.randn(2, 16, 8), bias=torch.zeros(2, 16))
        >>> first.hidden().shape
        torch.Size([10, 2, 16])
    """

    tokens: Tensor  # y, [*, N, G, in]; features of edges, [*, E, 1, in]
    weight: Tensor  # [G, xi, in]
    bias: Tensor | None = None  # [G, xi]

    @property
    def shape(self) -> torch.Size:
        """The shape of the hidden vectors, [*, N, G, xi]."""
        return torch.Size((*self.tokens.shape[:-1], self.weight.shape[1]))

    def hidden(self) -> Tensor:
        """The hidden vectors, [*, N, G, xi]; under autocast, in the dtype of autocast."""
        tokens, weight, bias = self
        groups, xi, _ = weight.shape
        by_group = tokens.flatten(0, -3).transpose(0, 1).expand(groups, -1, -1)
        by_group = torch.bmm(by_group, weight.mT)
        hidden = by_group.transpose(0, 1).view(*tokens.shape[:-2], groups, xi)
        # Autocast computes the product in its own dtype, and the result keeps it.
        return hidden if bias is None else hidden + bias.to(hidden.dtype)


class EdgeNetworkParameters(NamedTuple):
    """Second layer, from an edge's hidden vector h [xi] to alpha, beta and Lambda.

    W_alpha, b_alpha, W_beta, b_beta, W_Lambda, b_Lambda of Algorithm 2 of the consensus paper, for
    each of H heads, rank r and D features per head:
    ``alpha = softplus(W_alpha . h + b_alpha)``, beta likewise, and the rows of
    ``W_Lambda h + b_Lambda``, normalised and divided by sqrt(r), are Lambda.

    Example:
        >>> import torch, graphattn as ga
        >>> H, r, D, xi = 2, 4, 8, 16
        >>> network = ga.EdgeNetworkParameters(
        ...     alpha=torch.randn(H, xi), alpha_bias=torch.zeros(H),
        ...     beta=torch.randn(H, xi), beta_bias=torch.zeros(H),
        ...     shear=torch.randn(H, r, D, xi), shear_bias=torch.zeros(H, r, D))
        >>> hidden = torch.randn(10, H, xi)
        >>> ga.consensus_edge_matrices(hidden, hidden, network, ga.window_path_graph(10, 1)).shape
        torch.Size([18, 2, 8, 8])
    """

    alpha: Tensor  # [H, xi]
    alpha_bias: Tensor  # [H]
    beta: Tensor  # [H, xi]
    beta_bias: Tensor  # [H]
    shear: Tensor  # [H, r, D, xi]
    shear_bias: Tensor  # [H, r, D]


# The matrix of an edge.


class EdgeMatrix(NamedTuple):
    """The parts of R = alpha I + beta Lambda^T Lambda, for every edge and head.

    alpha, beta [*, E, H]; unit_rows [*, E, H, r, D] holds sqrt(r) Lambda, rows of norm 1 (or 0).
    """

    alpha: Tensor
    beta: Tensor
    unit_rows: Tensor

    def apply(self, d: Tensor) -> Tensor:
        """R d = alpha d + (beta / r) sum_k row_k (row_k . d), for d [*, E, H, D]."""
        along_rows = (self.unit_rows * d[..., None, :]).sum(-1, keepdim=True)
        low_rank = (self.unit_rows * along_rows).sum(-2)
        rank = self.unit_rows.shape[-2]
        return self.alpha[..., None] * d + (self.beta / rank)[..., None] * low_rank

    def dense(self) -> Tensor:
        """R itself, [*, E, H, D, D]."""
        rank, features = self.unit_rows.shape[-2:]
        gram = self.unit_rows.transpose(-1, -2) @ self.unit_rows
        identity = torch.eye(features, dtype=gram.dtype, device=gram.device)
        return self.alpha[..., None, None] * identity + (self.beta / rank)[..., None, None] * gram


def edge_matrix(pre_activation: Tensor, network: EdgeNetworkParameters) -> EdgeMatrix:
    """The edge network (Algorithm 2) from its first layer's sum, [*, E, G, xi or 3 xi], G = H or 1.

    With 3 xi features the thirds feed alpha, beta and Lambda (one trunk each); with xi one trunk
    feeds all three.
    """
    hidden = functional.gelu(pre_activation)
    xi = network.alpha.shape[-1]
    thirds = hidden.split(xi, dim=-1) if hidden.shape[-1] == 3 * xi else (hidden,) * 3
    alpha = functional.softplus((thirds[0] * network.alpha).sum(-1) + network.alpha_bias)
    beta = functional.softplus((thirds[1] * network.beta).sum(-1) + network.beta_bias)
    shared = thirds[2].expand(*alpha.shape, xi)  # one trunk for all heads where G = 1
    raw = torch.einsum("...hx,hrdx->...hrd", shared, network.shear) + network.shear_bias
    return EdgeMatrix(alpha, beta, _unit_rows(raw))


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their norm; a zero row stays zero (RN of Eq. 36)."""
    # Dividing by the largest entry first changes nothing but keeps the squares in range.
    largest = rows.detach().abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)
    squared = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(squared == 0, 1, squared).rsqrt()


# Features of edges.

EdgeHidden = Tensor | FirstLayer | None


def check_edge_hidden(
    edge_hidden: Any, like: Tensor, hidden: torch.Size, graph: TokenGraph
) -> EdgeHidden:
    """Check that `edge_hidden` fits hidden vectors [*, tokens, G, xi or 3 xi] and the edges.

    `like` is a tensor with the dtype and device of the operation.
    """
    if edge_hidden is None:
        return None
    E, batch, (groups, width) = graph.num_edges, hidden[:-3], hidden[-2:]
    if not isinstance(edge_hidden, FirstLayer):
        shapes = (E, groups, width), (*batch, E, groups, width)
        _check_tensor("edge_hidden", edge_hidden, like, shapes, like.dtype)
        return edge_hidden
    if edge_hidden.bias is not None:
        raise ValueError(
            "edge_hidden.bias must be None: the bias of the first layer is part of target_hidden"
        )
    features, weight = edge_hidden.tokens, edge_hidden.weight
    F = features.shape[-1] if isinstance(features, Tensor) and features.dim() else 0
    _check_tensor("edge_hidden.tokens", features, like, ((E, 1, F), (*batch, E, 1, F)))
    _check_tensor("edge_hidden.weight", weight, like, ((groups, width, F),))
    return edge_hidden


def _check_tensor(
    name: str,
    tensor: Any,
    like: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Check that a tensor is floating-point (or has this dtype) and has one of these shapes."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point() or (dtype is not None and tensor.dtype != dtype):
        raise ValueError(f"{name} must be {dtype or 'floating-point'}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")
    if tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{name} must have shape {allowed} (edges in the order of graph.edge_index), "
            f"got {list(tensor.shape)}"
        )


def in_dtype(edge_hidden: EdgeHidden, dtype: torch.dtype) -> EdgeHidden:
    """Hidden vectors, or the layer that makes them, converted to a dtype."""
    if isinstance(edge_hidden, FirstLayer):
        tokens, weight, bias = edge_hidden
        return FirstLayer(
            tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
    return None if edge_hidden is None else edge_hidden.to(dtype)


def form(edge_hidden: Tensor | FirstLayer, keep: Tensor | None) -> Tensor:
    """F e_ij of every edge, [*, E, G, xi]; edges outside `keep`, bool [*, E, 1], are not read."""
    if isinstance(edge_hidden, FirstLayer):
        tokens = clear_invalid_edges(edge_hidden.tokens, keep)
        return edge_hidden._replace(tokens=tokens).hidden()
    return clear_invalid_edges(edge_hidden, keep)


def as_pair(edge_hidden: EdgeHidden, entries: int) -> tuple[Tensor | None, Tensor | None]:
    """A tensor [entries or 1, E, 1 or G, features] and the weight that is to be applied to it.

    The tensor is the features of edges; if the weight is None, it is their products F e_ij.
    """
    if edge_hidden is None:
        return None, None
    weight = None
    if isinstance(edge_hidden, FirstLayer):
        weight = edge_hidden.weight
        edge_hidden = edge_hidden.tokens
    if edge_hidden.dim() == 3:
        return edge_hidden[None], weight
    return edge_hidden.reshape(entries, *edge_hidden.shape[-3:]), weight
