"""The transformer block around a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_float
from graphattn.graphs.token_graph import TokenGraph
from graphattn.nn.config import Configured
from graphattn.nn.graph_layer import GraphLayer, Positions
from graphattn.nn.layer_cache import LayerCache
from graphattn.nn.overrides import names_of, replaced_beside
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
            For generation it needs, as those layers have them,
            ``init_cache(batch, window, *, dtype=None, device=None, rollback=0)`` and
            ``step(x, cache, *, valid=None, positions=None)``.
        mlp_ratio: hidden width of the perceptron, in units of dim.
        dropout: share of features zeroed after both parts, in training.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: as the mixer takes it
        - **context**: [*, M, context_dim], for a mixer across two tracks; handed on as it is. For
          some rows of one sequence it must come through ``mixer_norm``, as `x` does
        - **valid**, **positions**: passed on to the mixer (keyword)
        - **edge_features**: passed on where given, as consensus layers take them (keyword)
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
        edge_features: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens along the graph, then transform each by itself."""
        tracks = () if context is None else (context,)
        given: dict[str, Any] = {"valid": valid, "positions": positions}
        if edge_bias is not None:  # a mixer of somebody else need not know it
            given["edge_bias"] = edge_bias
        if edge_features is not None:
            given["edge_features"] = edge_features
        mixed = self.mixer(self.mixer_norm(x), graph, *tracks, **given)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    # Token by token.

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> Any:
        """An empty cache for :meth:`step`: the mixer's own, a :class:`LayerCache`.

        Args:
            batch: the leading dimensions of the tokens to come; () for a single text.
            window: how many tokens each token sees, itself included; None for all before it.
            dtype, device: of what is kept; the mixer's own if None.
            rollback: how many of the newest tokens ``cache.truncate`` can take back at any time.

        Raises:
            ValueError: names the mixer that cannot go token by token and what it needs; for
                arguments out of range; and where a subclass has replaced `forward` alone.
        """
        mixer = self._stepping_mixer()
        return mixer.init_cache(batch, window, dtype=dtype, device=device, rollback=rollback)

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        cache: Any,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The outputs of the next token, or of the next few, which the cache then holds too.

        T steps give what one forward over all T tokens gives in evaluation mode on the graph
        ``causal_window_graph(T, window)`` (``causal_graph(T)`` for window=None), to rounding.
        Features are never dropped out and there is no gradient: `forward` is for training.

        Args:
            x: [*, dim], the next token of every text, or [*, n, dim], the next n; * is the batch
                of the cache.
            cache: from this block's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real.
            positions: [*] (or [*, n]), where tokens stand for a rotary embedding; counted from 0
                by the cache if None.

        Returns:
            [*, dim] or [*, n, dim].

        Raises:
            ValueError: as :meth:`init_cache`, and for what does not fit the mixer or the cache.

        Example:
            >>> import torch, graphattn as ga
            >>> block = ga.nn.PreNormBlock(ga.nn.KrauseAttention(16, heads=4, top_k=3))
            >>> x = torch.randn(2, 40, 16)
            >>> y = block(x, ga.causal_window_graph(40, window=8))
            >>> cache = block.init_cache(2, window=8)
            >>> prompt = block.step(x[:, :39], cache)
            >>> torch.allclose(block.step(x[:, 39], cache), y[:, 39], atol=1e-5)
            True
        """
        mixer = self._stepping_mixer()
        if not isinstance(x, Tensor) or x.shape[-1:] != (mixer.dim,):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"x must be a tensor of shape [*, {mixer.dim}] (a token) or [*, n, {mixer.dim}] "
                f"(n of them), got {got}"
            )
        # (The cache knows the dtype, and is asked faster than a weight.)
        other = isinstance(cache, LayerCache) and x.dtype != cache.owner[1]
        if other and isinstance(mixer, GraphLayer):
            mixer.check_dtype("x", x)
        mixed = mixer.step(self.mixer_norm(x), cache, valid=valid, positions=positions)
        dropout = self.dropout
        if type(dropout) is nn.Dropout:  # nothing is dropped here, in no mode
            x = x + mixed
            return x + self.mlp(self.mlp_norm(x))
        x = x + dropout(mixed)
        return x + dropout(self.mlp(self.mlp_norm(x)))

    def _stepping_mixer(self) -> Any:
        """The mixer; a ValueError where steps would not give what `forward` gives."""
        if replaced := replaced_beside(self, ("forward",), ("step",)):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so it would "
                "not give what forward gives: override step, too"
            )
        mixer: Any = self.mixer
        if hasattr(mixer, "step") and hasattr(mixer, "init_cache"):
            return mixer
        name = type(mixer).__name__
        if isinstance(mixer, GraphLayer):
            raise ValueError(
                f"mixer {name} cannot go token by token: it attends to a context, which is there "
                "from the start. Call the block"
            )
        raise ValueError(
            f"mixer {name} cannot go token by token: it needs init_cache(batch, window, *, "
            "dtype=None, device=None, rollback=0) and step(x, cache, *, valid=None, "
            "positions=None), which gives for the next tokens what forward gives on a causal graph"
        )
