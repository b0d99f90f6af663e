"""The transformer block around a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphattn.graphs.arguments import as_float
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.config import Configured
from graphattn.nn.graph_layer import Positions
from graphattn.ops.inputs import Valid


class PreNormBlock(Configured, nn.Module):
    r"""A layer over a token graph and a two-layer perceptron, each normalised and residual.

    .. math::
        x' = x + \mathrm{mixer}(\mathrm{norm}(x), G), \qquad
        y = x' + W_2 \, \mathrm{gelu}(W_1 \, \mathrm{norm}(x'))

    The pre-LayerNorm block (Xiong et al., 2020; GKA paper, Eq. 8-10, there with DropPath;
    consensus paper, E.1). One mechanism is exchanged for another by exchanging `mixer`.

    Args:
        mixer: a layer of :mod:`graphattn.nn`, or any module with a ``dim``, the block's width, and
            ``forward(x, graph, *, valid=None, positions=None)`` from [*, N, dim] to the same shape.
        mlp_ratio: hidden width of the perceptron, in units of dim.
        dropout: share of features zeroed after both parts, in training.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: as the mixer takes it
        - **context**: [*, M, context_dim], for a mixer across two tracks
        - **valid**, **positions**: passed on to the mixer (keyword)
        - **edge_bias**: passed on to a mixer that takes it, as attention layers do (keyword)
        - **output**: [*, N, dim]

    Raises:
        ValueError: if `mixer` is no module with a ``dim``, or a number is out of range.

    Example:
        >>> import torch, graphattn as ga
        >>> block = ga.nn.PreNormBlock(ga.nn.KrauseAttention(16, heads=4, top_k=3))
        >>> block(torch.randn(2, 10, 16), ga.causal_window_graph(10, window=6)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(self, mixer: nn.Module, *, mlp_ratio: float = 4.0, dropout: float = 0.0) -> None:
        super().__init__()
        dim = getattr(mixer, "dim", None)
        if not isinstance(mixer, nn.Module) or not isinstance(dim, int):
            raise ValueError(
                "mixer must be a layer of graphattn.nn, or a module with an integer `dim` and "
                "forward(x, graph, *, valid=None, positions=None), "
                f"got {type(mixer).__name__}"
            )
        hidden = int(as_float("mlp_ratio", mlp_ratio, positive=True) * dim)
        if hidden < 1:
            raise ValueError(f"mlp_ratio must leave a hidden width >= 1, got {mlp_ratio} x {dim}")
        if as_float("dropout", dropout, positive=False) >= 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.mixer = mixer
        self.mixer_norm = nn.LayerNorm(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draw every parameter anew (of the mixer's, those it knows how to)."""
        if callable(reset := getattr(self.mixer, "reset_parameters", None)):
            reset()
        for part in (self.mixer_norm, self.mlp_norm, *self.mlp):
            if isinstance(part, nn.LayerNorm | nn.Linear):
                part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | Tensor,
        context: Tensor | None = None,
        *,
        valid: Valid = None,
        positions: Positions = None,
        edge_bias: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens along the graph, then transform each by itself."""
        tracks = () if context is None else (context,)
        given: dict[str, Any] = {"valid": valid, "positions": positions}
        if edge_bias is not None:  # a mixer of somebody else need not know it
            given["edge_bias"] = edge_bias
        mixed = self.mixer(self.mixer_norm(x), graph, *tracks, **given)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))
