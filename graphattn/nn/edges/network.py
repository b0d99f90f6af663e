"""The network that computes the matrix of an edge from the features of its two tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network import (
    EdgeMatrix,
    EdgeNetworkParameters,
    FirstLayer,
    edge_matrix,
)
from graphattn.ops.inputs import ValidPair, clear_invalid_edges, valid_edges


class GroupedLinear(nn.Module):
    """One linear map per group: x [*, N, G, in] -> [*, N, G, out], weight [G, out, in].

    If x is [*, N, 1, in], all groups read the same.
    """

    def __init__(self, groups: int, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return FirstLayer(x, self.weight, self.bias).hidden()

    def unapplied(self, x: Tensor) -> FirstLayer | Tensor:
        """Return the map and its input, not yet applied; if :meth:`is_plain` is false, or groups
        read the same, the result."""
        if x.shape[-2] == len(self.weight) and self.is_plain():
            return FirstLayer(x, self.weight, self.bias)
        return self(x)

    def is_plain(self) -> bool:
        """Whether a call runs this :meth:`forward` and nothing else: no subclass, no hooks."""
        changed = type(self) is not GroupedLinear or "forward" in vars(self)
        hooks = (
            self._forward_hooks,
            self._forward_pre_hooks,
            self._backward_hooks,
            self._backward_pre_hooks,
        )
        return not (changed or any(hooks) or _has_global_hooks())

    def __repr__(self) -> str:
        groups, outputs, inputs = self.weight.shape
        return f"GroupedLinear(groups={groups}, {inputs} -> {outputs})"


def _has_global_hooks() -> bool:
    """Whether torch's global module hooks may change the output of a module.

    The hooks of :func:`graphattn.diagnostics.record` are marked as read-only and do not count. A
    recorded model therefore runs the same code, with bit-identical results.
    """
    module = torch.nn.modules.module
    tables = (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
    )
    return any(
        not getattr(hook, "only_watches", False) for table in tables for hook in table.values()
    )


class EdgeNetwork(nn.Module):
    r"""Compute alpha, beta and Lambda of every edge from [y_i; y_j] (Algorithms 2 and 3).

    The first layer acts on the concatenation, so it is two maps, `target` on y_i (with the bias)
    and `source` on y_j, each computed once per token; their sum passes through GELU on the edge.
    With ``edge_features`` the features of the edge are a third input: `edge`, a map whose result is
    added to that sum.
    The second layer is :class:`~graphattn.EdgeNetworkParameters`.

    With ``edge_input="head"``, the network of a head reads that head's slice of y; with "full", it
    reads all of y. With ``edge_networks="shared"``, the first layer of all heads is one. With
    ``trunk="shared"``, alpha, beta and Lambda have one hidden vector
    in common, which reproduces every count of Table 9. With "separate", each has its own, exactly
    as in Algorithm 2.

    With ``share_alpha`` all heads of an edge have one alpha. Without ``learned_beta`` there is no
    network for beta, which is then the rank: R is alpha I plus the sum of v v^T over the unit rows
    v of Lambda. Both are as in the code that the authors published.
    """

    lacks_trunk = False  # of networks that were pickled before beta could be fixed

    def __init__(
        self,
        heads: int,
        head_dim: int,
        target_dim: int,
        source_dim: int,
        *,
        rank: int,
        hidden: int,
        edge_input: str,
        trunk: str,
        edge_networks: str | None = None,
        edge_features: int = 0,
        share_alpha: bool = False,
        learned_beta: bool = True,
    ) -> None:
        super().__init__()
        self.groups = 1 if networks_of(edge_input, edge_networks) == "shared" else heads
        self.parts = heads if edge_input == "head" else 1  # into which tokens are split
        trunks = 1 if trunk == "shared" else 3 if learned_beta else 2
        self.lacks_trunk = trunks == 2
        target_in, source_in = target_dim // self.parts, source_dim // self.parts
        self.target = GroupedLinear(self.groups, target_in, trunks * hidden, bias=True)
        self.source = GroupedLinear(self.groups, source_in, trunks * hidden, bias=False)
        self.edge: GroupedLinear | None = None
        if edge_features:
            self.edge = GroupedLinear(self.groups, edge_features, trunks * hidden, bias=False)
        of_alpha = 1 if share_alpha else heads
        self.alpha = nn.Parameter(torch.empty(of_alpha, hidden))
        self.alpha_bias = nn.Parameter(torch.empty(of_alpha))
        self.beta = nn.Parameter(torch.empty(heads, hidden)) if learned_beta else None
        self.beta_bias = nn.Parameter(torch.empty(heads)) if learned_beta else None
        self.shear = nn.Parameter(torch.empty(heads, rank, head_dim, hidden))
        self.shear_bias = nn.Parameter(torch.empty(heads, rank, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw parameters as torch's Linear does: uniform in +-1/sqrt(fan_in).

        The rows of Lambda must not start at zero, where the gradient of R with respect to them is
        0.
        """
        first = [self.target, self.source, *([] if self.edge is None else [self.edge])]
        fan_in = sum(layer.weight.shape[-1] for layer in first)
        for layer in first:
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        bound = 1 / math.sqrt(self.alpha.shape[-1])
        for weight in self._parameters.values():
            if weight is not None:
                nn.init.uniform_(weight, -bound, bound)

    def second_layer(self) -> EdgeNetworkParameters:
        """Return the parameters of the second layer, which follows the GELU, for every head."""
        alpha: Tensor = self.alpha
        alpha_bias: Tensor = self.alpha_bias
        heads = len(self.shear)
        if len(alpha) != heads:
            alpha, alpha_bias = alpha.repeat(heads, 1), alpha_bias.repeat(heads)
        if self.beta is not None and self.beta_bias is not None:
            beta: Tensor = self.beta
            beta_bias: Tensor = self.beta_bias
        else:  # softplus(beta_bias) is the rank
            beta = torch.zeros_like(alpha)
            beta_bias = torch.full_like(alpha_bias, inverse_softplus(self.shear_bias.shape[1]))
        return EdgeNetworkParameters(
            alpha, alpha_bias, beta, beta_bias, self.shear, self.shear_bias
        )

    @property
    def width(self) -> int:
        """The numbers in the hidden vector of one group."""
        width = self.source.weight.shape[1]
        return width // 2 * 3 if self.lacks_trunk else width

    def all_trunks(self, hidden: Tensor) -> Tensor:
        """Return hidden vectors of alpha, beta and Lambda; those of a fixed beta are alpha's."""
        return torch.cat([hidden[..., : hidden.shape[-1] // 2], hidden], dim=-1)

    def is_plain(self) -> bool:
        """Whether :meth:`edge_matrix` is the method of this class."""
        return type(self).edge_matrix is EdgeNetwork.edge_matrix and "edge_matrix" not in vars(self)

    def edge_matrix(self, hidden_sum: Tensor, edge_hidden: Tensor | None = None) -> EdgeMatrix:
        """Compute R of every edge from `hidden_sum`, in its dtype.

        `hidden_sum` is target_hidden_i + source_hidden_j. If given, `edge_hidden`, F e_ij, is added
        to it.
        """
        if edge_hidden is not None:
            hidden_sum = hidden_sum + edge_hidden
        parameters = (tensor.to(hidden_sum.dtype) for tensor in self.second_layer())
        return edge_matrix(hidden_sum, EdgeNetworkParameters(*parameters))

    def first_layers(
        self, target: Tensor, source: Tensor
    ) -> tuple[FirstLayer | Tensor, FirstLayer | Tensor]:
        """Return the first layer of targets and of sources, for an operation that applies it
        itself.

        If :meth:`target_hidden` or :meth:`source_hidden` is overridden, the layer is applied here.
        """
        hidden: list[FirstLayer | Tensor] = []
        sides = (self.target, target, "target_hidden"), (self.source, source, "source_hidden")
        for layer, y, name in sides:
            if getattr(type(self), name) is not getattr(EdgeNetwork, name) or name in vars(self):
                hidden.append(getattr(self, name)(y))
                continue
            y = self.by_group(y)
            if self.lacks_trunk:
                hidden.append(self.all_trunks(layer(y)))
            else:
                hidden.append(layer.unapplied(y) if isinstance(layer, GroupedLinear) else layer(y))
        return hidden[0], hidden[1]

    def by_group(self, y: Tensor) -> Tensor:
        """Split tokens into what the heads read, [*, N, H, dim / H], or [*, N, 1, dim] if all
        read the same."""
        return y.view(*y.shape[:-1], self.parts, y.shape[-1] // self.parts)

    def target_hidden(self, y: Tensor) -> Tensor:
        """Apply the first layer to the targets: [*, N, dim] -> [*, N, G, xi]."""
        hidden: Tensor = self.target(self.by_group(y))
        return self.all_trunks(hidden) if self.lacks_trunk else hidden

    def source_hidden(self, y: Tensor) -> Tensor:
        """Apply the first layer to the sources: [*, M, dim] -> [*, M, G, xi]."""
        hidden: Tensor = self.source(self.by_group(y))
        return self.all_trunks(hidden) if self.lacks_trunk else hidden

    def edge_hidden(
        self, features: Tensor, graph: TokenGraph, valid: ValidPair
    ) -> FirstLayer | Tensor:
        """Return the first layer of edge features [*, E, F], for an operation that applies it
        itself.

        If a user has replaced that layer, it is applied here, with the features of edges of invalid
        tokens cleared.
        """
        layer, y = self.edge, features.unsqueeze(-2)
        assert layer is not None
        if isinstance(layer, GroupedLinear) and layer.is_plain() and not self.lacks_trunk:
            return FirstLayer(y, layer.weight)
        if valid != (None, None):
            y = clear_invalid_edges(y, valid_edges(valid, *graph.edge_index))
        hidden: Tensor = layer(y)
        return self.all_trunks(hidden) if self.lacks_trunk else hidden


def inverse_softplus(x: float) -> float:
    """The number whose softplus is x > 0."""
    return x + math.log(-math.expm1(-x))


def networks_of(edge_input: str, edge_networks: str | None) -> str:
    """How many edge networks a layer has: "per_head" or "shared"; None is the usual one.

    Raises:
        ValueError: heads that read different slices of a token share a network.
    """
    if edge_networks is None:
        return "per_head" if edge_input == "head" else "shared"
    as_choice("edge_networks", edge_networks, ("per_head", "shared"))
    if (edge_input, edge_networks) == ("head", "shared"):
        raise ValueError(
            "edge_networks must be 'per_head' with edge_input='head', where every head reads its "
            "own slice of a token, got 'shared': use edge_input='full'"
        )
    return edge_networks


def check_edge_features(features: Any, width: int, x: Tensor, num_edges: int, name: str) -> Tensor:
    """Check `features`, [E, F] or [*, E, F], of a layer called `name` made for F = `width`.

    Raises: ValueError: they are missing or not expected, or do not fit the edges of the graph or
        `x`.
    """
    if features is None:
        raise ValueError(
            f"edge_features must be a tensor of shape [{num_edges}, {width}], or one of these per "
            f"sequence, got None: this {name} was made with edge_features={width}"
        )
    if not width:
        got = features.shape[-1] if isinstance(features, Tensor) and features.dim() else "F"
        raise ValueError(
            f"edge_features cannot be given to this {name}, which was made with edge_features=0: "
            f"make the layer with edge_features={got}, the number of features of an edge"
        )
    if not isinstance(features, Tensor):
        raise ValueError(f"edge_features must be a tensor, got {type(features).__name__}")
    shape = (num_edges, width)
    if features.shape not in (shape, (*x.shape[:-2], *shape)):
        raise ValueError(
            f"edge_features must have shape {list(shape)} or {[*x.shape[:-2], *shape]} (edges in "
            f"the order of graph.edge_index, features), got {list(features.shape)}"
        )
    if features.device != x.device:
        raise ValueError(
            f"edge_features must be on the device of x, {x.device}, got {features.device}"
        )
    return features
