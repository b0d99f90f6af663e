"""Attention over a token graph for the `attn_layer` of timm's models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from graphattn.graphs import from_mask, grid_window_graph
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.torch.convert import checked_options
from graphattn.integrations.torch.masks import Places, SeenMask, seen_everywhere, seen_in_mask
from graphattn.integrations.torch.multihead import MultiheadOptions, attend, new_bandwidths

MIXERS = ("dot", "rbf", "krause")


def timm_attention(
    mixer: str = "dot",
    *,
    grid: tuple[int, int] | None = None,
    radius: int | None = None,
    prefix_tokens: int = 1,
    graph: TokenGraph | Callable[[int, int], TokenGraph] | None = None,
    top_k: int | None = None,
    sigma: float | None = None,
) -> type[TimmAttention]:
    """Return a class that timm's vision transformers take as their `attn_layer`.

    It has the constructor and the call of ``timm.layers.Attention``, and parameters with the same
    names (`qkv`, `proj`, `q_norm`, `k_norm`, `norm`), so pretrained weights can be loaded. With
    ``mixer="krause"`` it also has `log_sigma` [heads], which pretrained weights lack: load them
    first, then replace modules with :meth:`TimmAttention.from_attention`. Do the same in versions
    of timm without `attn_layer`.

    Args:
        mixer: "dot", "rbf" or "krause", as in :func:`convert`.
        grid: height and width of the image in patches, such as (14, 14) for 224 pixels and patches
            of 16. Together with `radius`, it gives each patch a square window.
        radius: radius of that window, in patches.
        prefix_tokens: tokens before the patches (class token, registers), as in
            ``num_prefix_tokens`` of the model; they see and are seen by all.
        graph: instead of a grid: a TokenGraph, or a function ``(num_tokens, num_tokens) ->
            TokenGraph``, including prefix tokens. Without grid and graph, every token sees all
            tokens.
        top_k: how many sources every target sees in each head.
        sigma: bandwidth of "rbf", and initial bandwidth of "krause". None means D ** 0.25 with D
            features per head.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed. A
            call raises it if its number of tokens differs from that of the graph (images of another
            size, dropped patches).

    Example:
        >>> import torch
        >>> from graphattn.integrations import torch as gtorch
        >>> attention = gtorch.timm_attention(grid=(4, 4), radius=1)
        >>> layer = attention(32, num_heads=4, qkv_bias=True)  # as timm does
        >>> layer(torch.randn(2, 17, 32)).shape
        torch.Size([2, 17, 32])
    """
    as_choice("mixer", mixer, MIXERS)
    prefix_tokens = as_int("prefix_tokens", prefix_tokens, 0)
    if (grid is None) != (radius is None):
        raise ValueError(
            f"grid and radius must be given together, got grid={grid} and radius={radius}"
        )
    if grid is not None and radius is not None:
        if graph is not None:
            raise ValueError(f"graph must be None if grid is given, got grid={grid} and a graph")
        graph = _grid_graph(grid, radius, prefix_tokens)
    return _class_of(checked_options(mixer, graph, None, top_k, sigma))


class TimmAttention(nn.Module):
    """Attention over a token graph with the signature of ``timm.layers.Attention``.

    Args:
        dim: width of the tokens.
        num_heads: H, the number of heads.
        attn_head_dim: D; dim / H if None.
        dim_out: width of the output; dim if None.
        qkv_bias, qk_norm, scale_norm, proj_bias: whether there are these biases and normalisations.
        attn_drop, proj_drop: dropout of the attention weights, and of the output.
        norm_layer: class of the norms for `qk_norm` and `scale_norm`.

    Shapes:
        - **x**: [B, N, dim]
        - **attn_mask**: bool (True: is seen) or floats that are added, [N, N] or [B or 1, H or 1,
          N, N], as in torch's scaled_dot_product_attention
        - **output**: [B, N, dim_out]
    """

    options: ClassVar[MultiheadOptions] = MultiheadOptions()
    log_sigma: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads must divide dim = {dim}, got {num_heads}")
        if norm_layer is None and (qk_norm or scale_norm):
            raise ValueError(
                f"norm_layer must be given with qk_norm={qk_norm} and scale_norm={scale_norm}, got "
                "None"
            )
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        placed = {name: given for name, given in placed.items() if given is not None}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads if attn_head_dim is None else attn_head_dim
        self.attn_dim = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * self.attn_dim, bias=qkv_bias, **placed)
        make: Any = norm_layer
        self.q_norm = make(self.head_dim, **placed) if qk_norm else nn.Identity()
        self.k_norm = make(self.head_dim, **placed) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = make(self.attn_dim, **placed) if scale_norm else nn.Identity()
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **placed)
        self.proj_drop = nn.Dropout(proj_drop)
        self._make_bandwidths()

    @classmethod
    def from_attention(cls, attention: Any) -> Self:
        """Return a module of this class with the parameters of a ``timm.layers.Attention``.

        Raises:
            ValueError: if the attention has other parts.

        Example:
            >>> from graphattn.integrations import torch as gtorch
            >>> dot, krause = gtorch.timm_attention(), gtorch.timm_attention("krause", top_k=8)
            >>> new = krause.from_attention(dot(32, num_heads=4))
            >>> sorted(new.state_dict())
            ['log_sigma', 'proj.bias', 'proj.weight', 'qkv.weight']
        """
        known = isinstance(attention, TimmAttention) or type(attention).__name__ == "Attention"
        needed = ("num_heads", "qkv", "proj", "attn_drop", "proj_drop")
        missing = [name for name in needed if getattr(attention, name, None) is None]
        if not known or missing:
            raise ValueError(
                f"attention must be a timm.layers.Attention, got a {type(attention).__name__}"
                + (f" without {missing}" if missing else "")
            )
        qkv, proj = attention.qkv, attention.proj
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.num_heads, new.attn_dim = attention.num_heads, proj.in_features
        if qkv.out_features != 3 * new.attn_dim or new.attn_dim % new.num_heads:
            raise ValueError(
                f"attention must have a qkv of 3 x {new.attn_dim} features (the width of proj) in "
                f"{new.num_heads} heads, got {qkv.out_features}"
            )
        new.head_dim = new.attn_dim // new.num_heads
        scale = getattr(attention, "scale", new.head_dim**-0.5)
        if abs(scale * new.head_dim**0.5 - 1) > 1e-6:
            raise ValueError(f"attention.scale must be {new.head_dim**-0.5}, got {scale}")
        for name in ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"):
            setattr(new, name, getattr(attention, name, nn.Identity()))
        new._make_bandwidths(getattr(attention, "log_sigma", None))
        return new.train(attention.training)

    def _make_bandwidths(self, learned: nn.Parameter | None = None) -> None:
        given = self.options.sigma
        self.sigma = self.head_dim**0.25 if given is None else given
        krause = self.options.mixer == "krause"
        if krause and learned is None:
            learned = new_bandwidths(self.sigma, self.num_heads, self.proj.weight)
        self.register_parameter("log_sigma", learned if krause else None)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend over the graph, limited by the mask."""
        B, N, _ = x.shape
        heads = (3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).unflatten(-1, heads).unbind(2)  # [B, N, H, D]
        q, k = self.q_norm(q), self.k_norm(k)
        seen = self._seen(B, N, attn_mask, is_causal, x.device)
        sigma: float | Tensor | None = None
        if self.options.mixer != "dot":
            sigma = self.sigma if self.log_sigma is None else self.log_sigma.exp()
        p = self.attn_drop.p if self.training else 0.0
        out, _ = attend(q, k.to(q.dtype), v.to(q.dtype), seen, sigma, self.options.top_k, p, False)
        return self.proj_drop(self.proj(self.norm(out.to(v.dtype).flatten(-2))))

    def _seen(
        self, B: int, N: int, attn_mask: Tensor | None, is_causal: bool, device: torch.device
    ) -> list[SeenMask]:
        places = Places(self.options.graph)
        graph = self.options.graph
        if isinstance(graph, TokenGraph) and graph.num_targets != N:
            raise ValueError(
                f"graph must have {N} targets and {N} sources, the number of tokens of this call, "
                f"got {graph.num_targets} and {graph.num_sources}: check grid= (height, width) and "
                "prefix_tokens= (class token, registers); if images have several sizes, pass a "
                "function as graph="
            )
        if attn_mask is None:
            return [seen_everywhere(places, N, N, device, causal=is_causal)]
        if is_causal:
            raise ValueError(
                "attn_mask must be None with is_causal=True, as in torch's "
                "scaled_dot_product_attention, got both"
            )
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        wanted = ((1, B), (1, self.num_heads), (N,), (N,))
        fits = mask.dim() == 4 and all(
            n in allowed for n, allowed in zip(mask.shape, wanted, strict=True)
        )
        if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ValueError(
                f"attn_mask must be bool or floats of shape [{N}, {N}] or "
                f"[{B} or 1, {self.num_heads} or 1, {N}, {N}], got {attn_mask.dtype} of shape "
                f"{list(attn_mask.shape)}"
            )
        return seen_in_mask(places, mask)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, mixer={self.options.mixer!r}{self.options.shown()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the options, because the class itself is made dynamically."""
        return _empty, (self.options,), self.__dict__.copy()


@functools.cache
def _class_of(options: MultiheadOptions) -> type[TimmAttention]:
    return type("GraphAttention", (TimmAttention,), {"options": options, "__module__": __name__})


def _empty(options: MultiheadOptions) -> TimmAttention:
    cls = _class_of(options)
    return cls.__new__(cls)


def _grid_graph(grid: tuple[int, int], radius: int, prefix_tokens: int) -> TokenGraph:
    try:
        height, width = grid
    except (TypeError, ValueError):
        raise ValueError(f"grid must be (height, width) in patches, got {grid!r}") from None
    if prefix_tokens <= 1:
        return grid_window_graph(height, width, radius, class_token=prefix_tokens == 1)
    patches = grid_window_graph(height, width, radius)
    mask = torch.ones((prefix_tokens + patches.num_targets,) * 2, dtype=torch.bool)
    mask[prefix_tokens:, prefix_tokens:] = patches.to_mask()
    return from_mask(mask)
