"""Replace the attention modules of PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from graphattn import nn as ga_nn
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.arguments import check_takes_two, numbers_of_layers
from graphattn.integrations.hooks import move_hooks
from graphattn.integrations.torch.multihead import (
    ConvertedAttention,
    GraphMultiheadAttention,
    LayerAttention,
    MultiheadOptions,
)

MIXERS = ("dot", "rbf", "krause", "gka", "vlt", "consensus")
BY_DISTANCE = ("rbf", "krause", "gka")
OF_TOKENS = (
    "gka",
    "vlt",
    "consensus",
)  # they average the tokens themselves, so they cannot do cross-attention
CONSENSUS_WINDOW = 2  # as in the paper

logger = logging.getLogger(__name__)


def convert(
    module: nn.Module,
    mixer: str = "dot",
    *,
    graph: TokenGraph | Callable[[int, int], TokenGraph] | None = None,
    window: int | None = None,
    top_k: int | None = None,
    sigma: float | None = None,
    layers: int | Iterable[int] | None = None,
) -> nn.Module:
    r"""Replace every `nn.MultiheadAttention` inside a module by attention over a token graph.

    This includes the modules inside `nn.TransformerEncoderLayer`, `nn.TransformerEncoder`,
    `nn.TransformerDecoderLayer`, `nn.TransformerDecoder`, `nn.Transformer` and your own modules.
    Calls do not change: masks, padding, both orders of dimensions and returned weights work as
    before. With ``mixer="dot"`` and no other option, results and gradients are those of the
    replaced module.

    =============== =========================================================================
    `mixer`         what takes the place of attention; its parameters
    =============== =========================================================================
    ``"dot"``       softmax attention; the module's own parameters
    ``"rbf"``       weights by the distance of queries and keys, :math:`e^{-\lVert q - k
                    \rVert^2 / 2 \sigma^2}`; the module's own
    ``"krause"``    the same among the `top_k` nearest (Krause Synchronization Transformers);
                    the module's own, and a bandwidth per head that is learned, `log_sigma`
    ``"gka"``       a :class:`~graphattn.nn.GaussianKernelAttention` (Projection-Free
                    Transformers, Eq. 3-5): the output projection and a bandwidth per head
    ``"vlt"``       a :class:`~graphattn.nn.DotProductAttention` whose values are the tokens
                    themselves (the same paper, Table 5): query, key, output projection
    ``"consensus"`` a :class:`~graphattn.nn.SelfConsensus` with ``update="target"`` and
                    ``step_size="auto"`` (Stabilizing Transformer Training Through Consensus,
                    Algorithms 1 and 2): value and output projection, and a new network that
                    makes the matrix of an edge
    =============== =========================================================================

    All modules are checked before the first is replaced. Parameters that stay are the same tensors
    as before, so an optimizer continues to train them. Those of "vlt" (query, key) and "consensus"
    (value) are copies, because they were parts of one tensor.

    Args:
        module: any module; changed in place, unless it is an `nn.MultiheadAttention` itself.
        mixer: a name from the table.
        graph: which tokens see which, in addition to the masks of a call: a TokenGraph, for one
            number of tokens, or a function ``(num_targets, num_sources) -> TokenGraph``, for any.
            Decorate it with ``functools.cache``, so that masks are read once instead of once per
            layer.
        window: instead of a graph: how many tokens on each side a token sees; with a causal mask,
            it sees itself and the `window` tokens before it. None for no limit, except for
            "consensus" without `graph`, where it means 2.
        top_k: how many sources every target sees in each head; for "dot", "rbf", "krause", "vlt".
        sigma: bandwidth of "rbf", and initial bandwidth of "krause" and "gka". None means
            :math:`D^{1/4}` with D features per head for "rbf" and "krause" (logits then differ from
            those of dot products only by squared lengths), and :math:`D^{1/2}` for "gka".
        layers: which modules, as numbers in the order of ``module.named_modules()``; a decoder
            layer has two (`self_attn`, then `multihead_attn`). Negative numbers count from the end;
            None for all.

    Returns:
        The module itself, or a new module if `module` is an `nn.MultiheadAttention`.
        :func:`converted` returns the names of the replaced modules; their number is logged.

    Raises:
        ValueError: if there is no attention to replace; if a module has ``add_bias_kv`` or
            ``add_zero_attn``, its own `forward`, or parametrized weights; or if a mixer or window
            cannot be used in cross-attention. The message names the argument and says what is
            allowed. Nothing is changed then.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from graphattn.integrations import torch as gtorch
        >>> layer = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> encoder = gtorch.convert(nn.TransformerEncoder(layer, 2), mixer="rbf", window=8)
        >>> gtorch.converted(encoder)
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> encoder(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """
    options = checked_options(mixer, graph, window, top_k, sigma)
    modules = attention_modules(module)
    if not modules:
        raise ValueError(
            f"module must contain an nn.MultiheadAttention, got a {type(module).__name__} without "
            f"any{_hint(module)}"
        )
    numbers = chosen(layers, len(modules))
    made: dict[int, ConvertedAttention] = {}
    for number in numbers:
        name, old = modules[number]
        where = f"layer {number} ({name or 'the module itself'})"
        check_module(old, is_cross_attention(module, old), is_adapted(module, old), options, where)
        made[id(old)] = replacement(old, options)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in made:
                parent._modules[name] = made[id(child)]
    for parent in module.modules():
        inside = isinstance(parent, nn.TransformerEncoder) and any(
            isinstance(child, ConvertedAttention) for child in parent.modules()
        )
        if inside:  # nested tensors only work with PyTorch's fused code
            parent.use_nested_tensor = False  # type: ignore[assignment]
    logger.info("converted %d of %d attention modules", len(made), len(modules))
    return made.get(id(module), module)


def _hint(module: nn.Module) -> str:
    """Return a hint for a model of transformers, without importing transformers."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
        return ""
    return "; for models of transformers use graphattn.integrations.transformers.configure"


def converted(module: nn.Module) -> list[str]:
    """Return the names of the modules that :func:`convert` made.

    Example:
        >>> from torch import nn
        >>> from graphattn.integrations import torch as gtorch
        >>> decoder = nn.TransformerDecoderLayer(32, nhead=4)
        >>> gtorch.converted(gtorch.convert(decoder, mixer="krause", window=4, layers=0))
        ['self_attn']
    """
    named = module.named_modules()
    return [name for name, child in named if isinstance(child, ConvertedAttention)]


def attention_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that `layers=` counts: attention modules and converted ones."""
    kinds = (nn.MultiheadAttention, ConvertedAttention)
    return [(name, child) for name, child in module.named_modules() if isinstance(child, kinds)]


def checked_options(
    mixer: Any, graph: Any, window: Any, top_k: Any, sigma: Any
) -> MultiheadOptions:
    """Return the options, or raise a ValueError."""
    as_choice("mixer", mixer, MIXERS)
    if graph is not None and not isinstance(graph, TokenGraph) and not callable(graph):
        raise ValueError(
            "graph must be a TokenGraph or a function of (num_targets, num_sources) that returns "
            f"one, got {type(graph).__name__}"
        )
    if graph is not None and not isinstance(graph, TokenGraph):
        check_takes_two(graph)
    if graph is not None and window is not None:
        raise ValueError(
            f"window must be None if graph is given, got window={window}: put the window into the "
            "graph"
        )
    window = None if window is None else as_int("window", window, 1)
    if top_k is not None:
        if mixer in ("gka", "consensus"):
            raise ValueError(f"top_k must be None for mixer={mixer!r}, got {top_k}")
        top_k = as_int("top_k", top_k, 1)
    if sigma is not None:
        if mixer not in BY_DISTANCE:
            raise ValueError(
                f"sigma must be None for mixer={mixer!r}, got {sigma}: only {BY_DISTANCE} have a "
                "bandwidth"
            )
        sigma = as_float("sigma", sigma, positive=True)
    if mixer == "consensus" and graph is None and window is None:
        window = CONSENSUS_WINDOW
    return MultiheadOptions(mixer, graph, window, top_k, sigma)


def chosen(layers: Any, count: int) -> list[int]:
    """Return the numbers of the modules that `layers` chooses, out of `count`."""
    if layers is None:
        return list(range(count))
    numbers = numbers_of_layers(layers)
    if not numbers or min(numbers) < -count or max(numbers) >= count:
        raise ValueError(
            f"layers must contain numbers of the {count} attention modules, -{count} .. "
            f"{count - 1}, got {sorted(numbers)}"
        )
    return sorted({number % count for number in numbers})


def is_cross_attention(root: nn.Module, module: nn.Module) -> bool:
    """Return whether a module is known to do cross-attention."""
    kdim, vdim = getattr(module, "kdim", None), getattr(module, "vdim", None)
    return {kdim, vdim} != {getattr(module, "embed_dim", None)} or any(
        isinstance(parent, nn.TransformerDecoderLayer) and parent.multihead_attn is module
        for parent in root.modules()
    )


def is_adapted(root: nn.Module, module: nn.Module) -> bool:
    """Return whether a module is inside an adapter, such as peft's LoRA."""
    return any(parent._modules.get("base_layer") is module for parent in root.modules())


def check_module(
    module: Any, cross: bool, adapted: bool, options: MultiheadOptions, where: str
) -> None:
    """Raise an error for a module that cannot be replaced exactly."""
    if isinstance(module, LayerAttention):
        raise ValueError(
            f"layers must be nn.MultiheadAttention modules, but {where} is already converted to "
            f"mixer={module.options.mixer!r}, and its other projections no longer exist: convert "
            "the original module"
        )
    if parametrize.is_parametrized(module) or parametrize.is_parametrized(module.out_proj):
        raise ValueError(f"{where} must not have parametrized weights: remove them first")
    native = type(module) is not GraphMultiheadAttention
    if native and type(module).forward is not nn.MultiheadAttention.forward:
        raise ValueError(
            f"{where} must be an nn.MultiheadAttention, got {type(module).__name__}, whose own "
            "forward() would be lost: leave it out with layers="
        )
    if "forward" in vars(module):
        raise ValueError(
            f"{where} must not have its own forward(), which would be lost: remove it, or leave "
            "the module out with layers="
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError(f"{where} must be made with add_bias_kv=False, got add_bias_kv=True")
    if module.add_zero_attn:
        raise ValueError(f"{where} must be made with add_zero_attn=False, got add_zero_attn=True")
    if cross and options.mixer in OF_TOKENS:
        raise ValueError(
            f"mixer={options.mixer!r} must not be used in cross-attention, because it averages the "
            f"tokens of one sequence, got {where}: choose other modules with layers="
        )
    if adapted and options.mixer in OF_TOKENS:
        raise ValueError(
            f"mixer={options.mixer!r} must not be used inside an adapter, which needs the "
            f"projections that it removes, got {where}: convert before adding adapters"
        )
    if cross and options.window is not None:
        raise ValueError(
            f"window={options.window} must not be used in cross-attention, where targets and "
            f"sources are not the same tokens, got {where}: choose other modules with layers=, or "
            "give graph="
        )


def replacement(old: Any, options: MultiheadOptions) -> ConvertedAttention:
    """Make the module that replaces another one, with its weights and hooks."""
    new: ConvertedAttention
    if options.mixer in OF_TOKENS:
        new = LayerAttention(old, options, _layer(old, options))
    else:
        new = GraphMultiheadAttention(old, options)
    move_hooks(old, new)
    return new


def _layer(old: Any, options: MultiheadOptions) -> nn.Module:
    E, H, bias = old.embed_dim, old.num_heads, old.in_proj_bias is not None
    weights, given = old.in_proj_weight.chunk(3), old.in_proj_bias
    biases = (None,) * 3 if given is None else given.chunk(3)
    layer: Any
    if options.mixer == "gka":
        layer = ga_nn.GaussianKernelAttention(
            E, H, init_sigma=options.sigma, bias=bias, attention_dropout=old.dropout
        )
    elif options.mixer == "vlt":
        layer = ga_nn.DotProductAttention(
            E,
            H,
            value_projection=False,
            top_k=options.top_k,
            bias=bias,
            attention_dropout=old.dropout,
        )
    else:
        layer = ga_nn.SelfConsensus(E, H, step_size="auto", update="target", bias=bias)
    layer = layer.to(device=weights[0].device, dtype=weights[0].dtype)
    parts = {"vlt": {"query_proj": 0, "key_proj": 1}, "consensus": {"source_proj": 2}}
    with torch.no_grad():
        for name, part in parts.get(options.mixer, {}).items():
            projection = getattr(layer, name)
            projection.weight.copy_(weights[part]).requires_grad_(old.in_proj_weight.requires_grad)
            if bias:
                projection.bias.copy_(biases[part]).requires_grad_(given.requires_grad)
    layer.output_proj.weight = old.out_proj.weight
    if bias:
        layer.output_proj.bias = old.out_proj.bias
    return layer
