"""The transformer block around a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_float, as_int, as_share
from graphattn.graphs.token_graph import TokenGraph
from graphattn.near_names import explained
from graphattn.nn.base.graph_layer import GraphLayer, Positions
from graphattn.nn.base.overrides import names_of, replaced_beside
from graphattn.nn.blocks.compiled_step import BlockRun, UnknownModuleError, perceptron_step
from graphattn.nn.blocks.drop_path import drop_paths
from graphattn.nn.blocks.parts import Activation, Norm, make_activation, make_norm, zero_linear
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.files.config import Configured
from graphattn.ops.inputs import Valid


class PreNormBlock(Configured, nn.Module):
    r"""A layer over a token graph and a two-layer perceptron, each normalised and residual.

    .. math::
        x' = x + \mathrm{mixer}(\mathrm{norm}(x), G), \qquad
        y = x' + W_2 \, \mathrm{gelu}(W_1 \, \mathrm{norm}(x'))

    This is the pre-LayerNorm block (Xiong et al., 2020; GKA paper, Eq. 8-10; consensus paper, E.1).
    To use another mechanism, pass another `mixer`.

    With `condition_dim`, a vector c such as an embedded noise level modulates the block
    (adaLN-zero, Peebles and Xie, 2023; the consensus paper uses it through the backbone of Lou et
    al., 2024). Both parts, the mixer and the perceptron, become

    .. math::
        x' = x + g \odot \mathrm{part}\big( (1 + s) \odot \mathrm{norm}(x) + b \big)

    One linear map of c gives the shift b, the scale s and the gate g of both parts. Its weights
    start at 0, so the block starts as the identity.

    Args:
        mixer: a layer of :mod:`graphattn.nn`, or any module that has ``dim``, the width of the
            block, and ``forward(x, graph, *, valid=None, positions=None)`` from [*, N, dim] to the
            same shape. To generate, a module of your own also needs ``init_cache(batch, window, *,
            dtype=None, device=None, rollback=0)`` and ``step(x, cache, *, valid=None,
            positions=None)``.
        mlp_ratio: hidden width of the perceptron, in units of dim.
        dropout: share of the features that training sets to zero, after each of the two parts.
        drop_path: share of the sequences for which training leaves a part out. The part's output
            for the other sequences is divided by 1 - drop_path (stochastic depth, Huang et al.,
            2016; the GKA paper's DropPath).
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        norm_affine: whether the norms have weights (and LayerNorm, with `bias`, biases).
        activation: the activation of the perceptron: "gelu", or "relu2", which is the square of
            ReLU (So et al., 2021).
        bias: whether the perceptron and the norms have biases.
        condition_dim: width of the condition; None for a block without one.

    Shapes:
        - **x**: [*, N, dim]
        - **graph**: a graph that the mixer takes; or its part of one rank
          (:func:`graphattn.distributed.shard`), with the tokens of that rank
        - **context**: [*, M, context_dim], for a mixer across two tracks. The block passes it on
          without a norm. If `x` is some rows of a sequence and the context is that sequence, apply
          ``mixer_norm`` to the context first, as the block does to `x`
        - **valid**, **positions**: passed on to the mixer (keyword)
        - **edge_features**: passed on to the mixer if given; consensus layers take it (keyword)
        - **edge_bias**: passed on to the mixer if given; attention layers take it (keyword)
        - **tokens**: passed on to the mixer if given; value embeddings take it (keyword)
        - **condition**: [*, condition_dim], one per sequence, or [*, N, condition_dim], one per
          token, which packed sequences need (keyword)
        - **output**: [*, N, dim]

    Raises:
        ValueError: if `mixer` is not a module with an integer ``dim``, or if a number is out of
            range.

    Example:
        >>> import torch, graphattn as ga
        >>> block = ga.nn.PreNormBlock(ga.nn.KrauseAttention(16, heads=4, top_k=3))
        >>> block(torch.randn(2, 10, 16), ga.causal_window_graph(10, window=6)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        mixer: nn.Module,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm: Norm = "layer",
        norm_affine: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        condition_dim: int | None = None,
    ) -> None:
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
            raise ValueError(
                "mlp_ratio must give a hidden width mlp_ratio * dim >= 1, got "
                f"mlp_ratio={mlp_ratio} with dim={dim}"
            )
        if as_float("dropout", dropout, positive=False) >= 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.mixer = mixer
        self.mixer_norm = make_norm(norm, dim, affine=norm_affine, bias=bias)
        self.mlp_norm = make_norm(norm, dim, affine=norm_affine, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden, bias=bias),
            make_activation(activation),
            nn.Linear(hidden, dim, bias=bias),
        )
        self.dropout = nn.Dropout(dropout)
        self.drop_path = as_share("drop_path", drop_path)
        self.condition_dim = None
        self.modulation = None
        if condition_dim is not None:
            self.condition_dim = as_int("condition_dim", condition_dim, 1)
            self.modulation = zero_linear(self.condition_dim, 6 * dim)

    def reset_parameters(self) -> None:
        """Initialise the parameters again. A mixer without ``reset_parameters`` keeps its own."""
        if callable(reset := getattr(self.mixer, "reset_parameters", None)):
            reset()
        for part in (self.mixer_norm, self.mlp_norm, *self.mlp):
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
            nn.init.zeros_(self.modulation.bias)

    def forward(
        self,
        x: Tensor,
        graph: TokenGraph | ShardedGraph | Tensor,
        context: Tensor | None = None,
        *,
        valid: Valid = None,
        positions: Positions = None,
        edge_bias: Tensor | None = None,
        edge_features: Tensor | None = None,
        condition: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens along the graph, then transform each by itself."""
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor [*, N, dim], got {type(x).__name__}")
        tracks = () if context is None else (context,)
        given: dict[str, Any] = {"valid": valid, "positions": positions}
        if edge_bias is not None:  # a user's mixer may not have this argument
            given["edge_bias"] = edge_bias
        if edge_features is not None:
            given["edge_features"] = edge_features
        if tokens is not None:
            given["tokens"] = tokens
        to_mix, to_map, gate_mixed, gate_mapped = self._modulated(condition, x)
        mixed = self.mixer(to_mix(self._entering(self.mixer_norm, x)), graph, *tracks, **given)
        x = self._leaving(self.mixer_norm, x + self._branch(gate_mixed(mixed), graph))
        mapped = self.mlp(to_map(self._entering(self.mlp_norm, x)))
        return self._leaving(self.mlp_norm, x + self._branch(gate_mapped(mapped), graph))

    def _entering(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what a part reads."""
        normed: Tensor = norm(x)
        return normed

    def _leaving(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what becomes of the sum of a part and its input."""
        return x

    def _branch(self, y: Tensor, graph: Any) -> Tensor:
        """Return the contribution of a part, after the drops of training."""
        y = self.dropout(y)
        return drop_paths(y, self.drop_path, graph) if self.training else y

    def _modulated(self, condition: Tensor | None, x: Tensor) -> Any:
        """Return four functions: shift and scale the input of each part, gate its output."""
        if self.modulation is None:
            if condition is not None:
                raise ValueError(
                    "condition must be None for a block made without condition_dim, "
                    f"got {type(condition).__name__}"
                )
            return (_identity,) * 4
        terms = self.modulation(self._checked(condition, x)).chunk(6, -1)
        shift_mix, scale_mix, gate_mix, shift_map, scale_map, gate_map = terms
        return (
            lambda y: torch.addcmul(shift_mix, y, 1 + scale_mix),
            lambda y: torch.addcmul(shift_map, y, 1 + scale_map),
            lambda y: gate_mix * y,
            lambda y: gate_map * y,
        )

    def _checked(self, condition: Tensor | None, x: Tensor) -> Tensor:
        """The condition of every token, [*, N or 1, condition_dim]."""
        per_sequence = (*x.shape[:-2], self.condition_dim)
        if isinstance(condition, Tensor):
            if condition.shape == per_sequence:
                return condition.unsqueeze(-2)
            if condition.shape == (*x.shape[:-1], self.condition_dim):
                return condition
        got = list(condition.shape) if isinstance(condition, Tensor) else repr(condition)
        per_token = [*x.shape[:-1], self.condition_dim]
        raise ValueError(
            f"condition must have shape {list(per_sequence)} (one per sequence) or {per_token} "
            f"(one per token), got {got}"
        )

    # Generation, token by token.

    @explained
    def init_cache(
        self,
        batch: int | tuple[int, ...],
        window: int | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rollback: int = 0,
    ) -> Any:
        """Make an empty cache for :meth:`step`, as the mixer makes it (a :class:`LayerCache`).

        Args:
            batch: the leading dimensions of the tokens that will follow; () for a single text.
            window: how many tokens each token sees, itself included; None for all before it.
            dtype, device: dtype and device of the stored tensors; None takes the mixer's own.
            rollback: how many of the newest tokens ``cache.truncate`` can take back at any time.

        Raises:
            ValueError: if the mixer cannot generate token by token, if an argument is out of range,
                or if a subclass has replaced `forward` but not `step`.
        """
        mixer = self._stepping_mixer()
        return mixer.init_cache(batch, window, dtype=dtype, device=device, rollback=rollback)

    def step(
        self,
        x: Tensor,
        cache: Any,
        *,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of the next token, or of the next n, and add them to the cache.

        T steps give the same outputs as one call of `forward` in evaluation mode, over all T
        tokens, on the graph ``causal_window_graph(T, window)`` (``causal_graph(T)`` for
        window=None), up to rounding. A step uses no dropout and computes no gradients; use
        `forward` for training.

        Args:
            x: [*, dim], the next token of every text, or [*, n, dim], the next n; * is the batch
                of the cache.
            cache: from this block's :meth:`init_cache`; updated in place.
            valid: bool [*] (or [*, n]), True where a token is real.
            positions: [*] (or [*, n]), positions of the tokens for a rotary embedding. If None, the
                cache counts them from 0.
            tokens: integers [*] (or [*, n]), for a mixer with value embeddings.

        Returns:
            [*, dim] or [*, n, dim].

        Raises:
            ValueError: for the same reasons as :meth:`init_cache`, and if `x` or another argument
                does not fit the mixer or the cache.

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
        # The cache also stores the layer's dtype. Reading it there is faster than from a weight.
        other = isinstance(cache, LayerCache) and x.dtype != cache.owner[1]
        if other and isinstance(mixer, GraphLayer):
            mixer.check_dtype("x", x)
        if (
            valid is None
            and positions is None
            and tokens is None
            and not torch.compiler.is_compiling()
        ):
            try:
                return BlockRun(self, x, cache)(x)
            except UnknownModuleError:
                pass
        with torch.no_grad():
            given = {} if tokens is None else {"tokens": tokens}
            mixed = mixer.step(self.mixer_norm(x), cache, valid=valid, positions=positions, **given)
            y = None if torch.compiler.is_compiling() else perceptron_step(self, x, mixed)
            return self._mapped(x, mixed) if y is None else y

    def _mapped(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The output of a step, from its tokens and what the mixer made of them."""
        dropout = self.dropout
        if type(dropout) is nn.Dropout:  # step never drops features, not even in training mode
            x = x + mixed
            return x + self.mlp(self.mlp_norm(x))
        x = x + dropout(mixed)
        y: Tensor = x + dropout(self.mlp(self.mlp_norm(x)))
        return y

    def _stepping_mixer(self) -> Any:
        """Return the mixer, or raise a ValueError if steps would not equal `forward`."""
        if self.modulation is not None:
            raise ValueError(
                f"a block with condition_dim={self.condition_dim} has no step() and no cache: call "
                "the block on all tokens, with condition="
            )
        if replaced := replaced_beside(self, ("forward",), ("step",)):
            raise ValueError(
                f"step does not run the {names_of(replaced)} of {type(self).__name__}, so its "
                "outputs would differ from those of forward: override step, too"
            )
        mixer: Any = self.mixer
        if hasattr(mixer, "step") and hasattr(mixer, "init_cache"):
            return mixer
        name = type(mixer).__name__
        if isinstance(mixer, GraphLayer):
            raise ValueError(
                f"mixer {name} cannot generate token by token, because it attends to a context "
                "that is known from the start: call the block itself instead of init_cache and "
                "step"
            )
        raise ValueError(
            f"mixer {name} cannot generate token by token: it needs the methods init_cache(batch, "
            "window, *, dtype=None, device=None, rollback=0) and step(x, cache, *, valid=None, "
            "positions=None), and step must return for the next tokens what forward returns on a "
            "causal graph"
        )


class PostNormBlock(PreNormBlock):
    r"""A layer over a token graph and a two-layer perceptron, normalised after their residual sums.

    .. math::
        x' = \mathrm{norm}(x + \mathrm{mixer}(x, G)), \qquad
        y = \mathrm{norm}(x' + W_2 \, \mathrm{gelu}(W_1 \, x'))

    This is the block of the original transformer (Vaswani et al., 2017), and that of the vision
    models in the code that the authors of Krause attention published. It needs smaller learning
    rates or a warm-up (Xiong et al., 2020).

    Args:
        mixer, mlp_ratio, dropout, drop_path, norm, norm_affine, activation, bias: as in
            :class:`PreNormBlock`.

    Shapes:
        - as :class:`PreNormBlock`, without a condition

    Example:
        >>> import torch, graphattn as ga
        >>> block = ga.nn.PostNormBlock(ga.nn.KrauseAttention(16, heads=4, top_k=3))
        >>> y = block(torch.randn(2, 10, 16), ga.window_path_graph(10, window=2, self_loops=True))
        >>> bool(y.mean(-1).abs().max() < 1e-6)  # of every token
        True
    """

    def __init__(
        self,
        mixer: nn.Module,
        *,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm: Norm = "layer",
        norm_affine: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__(
            mixer,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            drop_path=drop_path,
            norm=norm,
            norm_affine=norm_affine,
            activation=activation,
            bias=bias,
        )

    def _entering(self, norm: nn.Module, x: Tensor) -> Tensor:
        return x

    def _leaving(self, norm: nn.Module, x: Tensor) -> Tensor:
        normed: Tensor = norm(x)
        return normed

    def _stepping_mixer(self) -> Any:
        raise ValueError(
            "PostNormBlock has no step() and no cache: call it on all tokens, or use PreNormBlock"
        )


def _identity(x: Tensor) -> Tensor:
    return x
