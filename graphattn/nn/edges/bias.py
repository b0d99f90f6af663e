"""Biases of edges from distances in space, or from any features of the edges.

Biases by relative position are in :mod:`graphattn.nn.edges.offset_bias`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.edges.offsets import unlike_a_table
from graphattn.nn.files.config import Configured
from graphattn.ops.backends import is_known_finite
from graphattn.ops.inputs import compute_dtype, full_precision


class DistanceBias(Configured, nn.Module):
    r"""Biases by distance in space: radial basis functions, mapped to one number per head.

    .. math::
        b_{ij}^h = c(d_{ij}) \sum_k W_{hk} \exp\Big(-\frac{(d_{ij} - \mu_k)^2}{2 \delta^2}\Big),
        \qquad c(d) = \frac{1 + \cos(\pi d / r)}{2}

    The centres :math:`\mu_k` go evenly from 0 to the cutoff r, with the spacing :math:`\delta`
    (SchNet, Schütt et al., 2017, Section 4). The cosine cutoff c makes the bias and its gradient 0
    for distances >= r. The cutoff has the unit of the positions, for example 20 for C-alpha atoms
    in Angstrom, the unit of :func:`graphattn.data.read_structure`.

    For two tokens at the same position, and for a self-loop, the distance and its gradient are 0.
    An edge gets bias 0 if a coordinate of one of its tokens is NaN or infinite, as for an
    unresolved atom.

    Args:
        heads: H, the number of heads of the attention layer.
        num_radial: number of radial basis functions.
        cutoff: r > 0; edges at this distance or farther get bias 0.
        zero_init: start with W = 0, so that the layer first computes the same as without biases.

    Shapes:
        - **positions**: [N, 3] or [*, N, 3] (any number of dimensions), or a pair for targets and
          sources
        - **graph**: a TokenGraph with N targets and M sources; or its part of one rank
          (:func:`graphattn.distributed.shard`). Positions are then those of the tokens of this
          rank, and the biases those of the edges of ``shard.graph``
        - **output**: [E, heads] or [*, E, heads], in the order of ``graph.edge_index``

        Raises: ValueError: if an argument is out of range, or `positions` does not fit `graph`.

    Example:
        >>> import torch, graphattn as ga
        >>> ca_positions = 3.8 * torch.randn(50, 3).cumsum(0) / 3**0.5  # Angstrom
        >>> graph = ga.radius_graph(ca_positions, radius=12.0, self_loops=True)
        >>> bias = ga.nn.DistanceBias(4, cutoff=12.0)
        >>> layer = ga.nn.KrauseAttention(16, heads=4)
        >>> layer(torch.randn(50, 16), graph, edge_bias=bias(ca_positions, graph)).shape
        torch.Size([50, 16])
    """

    def __init__(
        self,
        heads: int,
        *,
        num_radial: int = 16,
        cutoff: float = 20.0,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.heads = as_int("heads", heads, 1)
        self.num_radial = as_int("num_radial", num_radial, 1)
        self.cutoff = as_float("cutoff", cutoff, positive=True)
        self.zero_init = bool(zero_init)
        # No bias: beyond the cutoff, the result must be 0.
        self.projection = nn.Linear(self.num_radial, self.heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projection again, or set it to zero with `zero_init`."""
        self.projection.reset_parameters()
        if self.zero_init:
            nn.init.zeros_(self.projection.weight)

    def forward(
        self,
        positions: Tensor | tuple[Tensor, Tensor] | list[Tensor],
        graph: TokenGraph | ShardedGraph,
    ) -> Tensor:
        """The bias of every edge."""
        if isinstance(graph, ShardedGraph):
            of_target, of_source = self._places(positions, graph.tokens)
            (of_source,) = graph.by_targets.exchange(of_source, dims=[-2])
            return graph.unlike_a_table(self.forward((of_target, of_source), graph.graph))
        basis = self.radial_basis(positions, graph).to(self.projection.weight.dtype)
        return unlike_a_table(self.projection(basis), graph)

    def radial_basis(
        self, positions: Tensor | tuple[Tensor, Tensor] | list[Tensor], graph: TokenGraph
    ) -> Tensor:
        """Return the radial basis functions of every edge, [*, E, num_radial], without parameters.

        Example:
            >>> import torch, graphattn as ga
            >>> graph = ga.window_path_graph(3, 1)
            >>> ga.nn.DistanceBias(4, num_radial=5).radial_basis(torch.randn(2, 3, 3), graph).shape
            torch.Size([2, 4, 5])
        """
        of_target, of_source = self._places(positions, graph)
        source, target = graph.edge_index
        dtype = compute_dtype(of_target.dtype)
        with full_precision(of_target.device):
            ends = []
            for places, token in ((of_target, target), (of_source, source)):
                known = places.isfinite().all(-1, keepdim=True)
                clean = places.to(dtype).masked_fill(~known, 0)
                ends.append((clean.index_select(-2, token), known.index_select(-2, token)))
            (there, known), (here, also_known) = ends
            square = (here - there).square().sum(-1, keepdim=True)
            same = square == 0  # at 0 the square root has no derivative
            distance = square.masked_fill(same, 1).sqrt().masked_fill(same, 0)
            distance = distance.clamp(max=self.cutoff)
            centers = torch.linspace(
                0, self.cutoff, self.num_radial, dtype=dtype, device=distance.device
            )
            spacing = self.cutoff / max(self.num_radial - 1, 1)
            basis = (((distance - centers) / spacing).square() / -2).exp()
            basis = basis * ((distance * (math.pi / self.cutoff)).cos() + 1) / 2
            return basis.masked_fill(~(known & also_known), 0)

    def _places(self, positions: Any, graph: Any) -> tuple[Tensor, Tensor]:
        """Return the checked positions of targets and sources."""
        if not isinstance(graph, TokenGraph):
            raise ValueError(
                "graph must be a TokenGraph (the second argument, after positions), got "
                f"{type(graph).__name__}: graphattn.from_edge_index(edge_index, num_targets) makes "
                "one"
            )
        single = isinstance(positions, Tensor)
        if single and graph.num_targets != graph.num_sources:
            raise ValueError(
                f"positions must be a pair (targets [*, {graph.num_targets}, 3], sources "
                f"[*, {graph.num_sources}, 3]) on a bipartite graph, got one tensor"
            )
        pair = (positions, positions) if single else positions
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                "positions must be a tensor [*, N, 3] or a pair of them (targets, sources), got "
                f"{type(positions).__name__}"
            )
        for places, count in zip(pair, (graph.num_targets, graph.num_sources), strict=True):
            if (
                not isinstance(places, Tensor)
                or not places.is_floating_point()
                or places.dim() < 2
                or places.shape[-2] != count
                or places.shape[-1] != pair[0].shape[-1]
                or places.shape[:-2] != pair[0].shape[:-2]
                or places.device != graph.device
            ):
                got = (
                    f"{places.dtype} of shape {list(places.shape)} on {places.device}"
                    if isinstance(places, Tensor)
                    else type(places).__name__
                )
                raise ValueError(
                    f"positions must be a floating-point tensor of shape [*, {count}, 3] (one row "
                    f"per token, the same * for targets and sources) on {graph.device}, got {got}"
                )
        return pair[0], pair[1]

    def __repr__(self) -> str:
        facts = [f"{self.heads}", f"num_radial={self.num_radial}", f"cutoff={self.cutoff:g}"]
        facts += ["zero_init=True"] * self.zero_init
        return f"DistanceBias({', '.join(facts)})"


class EdgeProjection(Configured, nn.Module):
    r"""Biases from features of edges: a linear map from F features to one number per head.

    .. math::
        b_{ij} = W e_{ij} + w

    as in Graphormer (Ying et al., 2021, Eq. 7, where they are averaged along paths). The bias is
    added to the logit of the edge.

    Args:
        features: F, the number of features of an edge.
        heads: H of the attention layer.
        bias: whether the map has a bias w. It adds the same number to all edges of a row, so it
            does not change a softmax, except with ``eps`` or a sink.
        zero_init: start with W = 0 and w = 0, so that the layer first computes the same as without
            biases. The map still gets gradients.

    Shapes:
        - **edge_attr**: [E, F] or [*, E, F], in the order of ``graph.edge_index``
        - **output**: [E, heads] or [*, E, heads]; NaN for an edge with a feature that is NaN or
          infinite. That has no effect if the edge touches an invalid token

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.causal_window_graph(10, window=4)
        >>> edge_attr = torch.randn(graph.num_edges, 5)
        >>> project = ga.nn.EdgeProjection(5, heads=4, zero_init=True)
        >>> layer = ga.nn.DotProductAttention(16, heads=4)
        >>> layer(torch.randn(2, 10, 16), graph, edge_bias=project(edge_attr)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self, features: int, heads: int, *, bias: bool = True, zero_init: bool = False
    ) -> None:
        super().__init__()
        self.features, self.heads = as_int("features", features, 1), as_int("heads", heads, 1)
        self.zero_init = bool(zero_init)
        self.projection = nn.Linear(self.features, self.heads, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the map again, or set it to zero with `zero_init`."""
        self.projection.reset_parameters()
        if self.zero_init:
            for parameter in self.projection.parameters():
                nn.init.zeros_(parameter)

    def forward(self, edge_attr: Tensor) -> Tensor:
        """The bias of every edge."""
        if (
            not isinstance(edge_attr, Tensor)
            or not edge_attr.is_floating_point()
            or edge_attr.dim() < 2
            or edge_attr.shape[-1] != self.features
        ):
            got = (
                f"{edge_attr.dtype} of shape {list(edge_attr.shape)}"
                if isinstance(edge_attr, Tensor)
                else type(edge_attr).__name__
            )
            raise ValueError(
                f"edge_attr must be a floating-point tensor [*, E, {self.features}], got {got}"
            )
        dtype = self.projection.weight.dtype
        if edge_attr.dtype != dtype and not torch.is_autocast_enabled(edge_attr.device.type):
            raise ValueError(
                f"edge_attr must have the module's dtype {dtype}, got {edge_attr.dtype}: convert "
                f"one of them, for instance by edge_attr.to({dtype})"
            )
        bias: Tensor
        if is_known_finite(edge_attr):
            bias = self.projection(edge_attr)
            return bias
        # 0 * NaN is NaN, so features of an edge without effect must not reach the gradient.
        missing = ~edge_attr.isfinite().all(-1, keepdim=True)
        bias = self.projection(edge_attr.masked_fill(missing, 0))
        return bias.masked_fill(missing, torch.nan)

    def __repr__(self) -> str:
        facts = [f"{self.features}", f"heads={self.heads}"]
        facts += ["bias=False"] * (self.projection.bias is None)
        facts += ["zero_init=True"] * self.zero_init
        return f"EdgeProjection({', '.join(facts)})"
