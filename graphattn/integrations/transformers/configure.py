"""Let graphattn compute the attention of a model, and choose and show the mixer of each layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from graphattn.integrations.transformers.attention import graph_attention
from graphattn.integrations.transformers.conversion.modules import attention_modules, is_attention
from graphattn.integrations.transformers.files.saving import is_marked, mark
from graphattn.integrations.transformers.masks.mask_function import graph_mask
from graphattn.integrations.transformers.options import (
    AS_IT_IS,
    GRAPH,
    GraphOf,
    add_step,
    checked_options,
    give_options,
    layers_for,
    steps_of,
)
from graphattn.warn import warn_caller

NAME = "graphattn"


def register() -> None:
    """Register "graphattn" as an `attn_implementation` of transformers.

    It registers the attention function and the mask function, which only work together. A second
    call has no effect.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from graphattn.integrations import transformers as gat
        >>> gat.register()
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = BertModel(config)
        >>> model.set_attn_implementation("graphattn")
    """
    AttentionInterface.register(NAME, graph_attention)
    AttentionMaskInterface.register(NAME, graph_mask)


def configure(
    model: nn.Module,
    mixer: str = "dot",
    *,
    window: int | None = None,
    top_k: int | None = None,
    sigma: float | None = None,
    graph: GraphOf | None = None,
    layers: Any = None,
) -> list[int]:
    r"""Choose how the attention of a Hugging Face model mixes, layer by layer.

    The weights of the model do not change; its attention implementation becomes "graphattn". The
    options are stored in ``model.config.graphattn`` and saved with the model;
    :func:`from_pretrained` reads them. A later call replaces the options of the layers that it
    names.

    Args:
        model: a model of transformers. It can be compiled, have adapters of peft, or be wrapped in
            DDP or FSDP. Configure the whole model, not a part of it, because files contain the
            numbers of its layers.
        mixer: "dot", the model's own softmax attention; "rbf", attention by distance,
            :math:`\exp(-\lVert q - k \rVert^2 / 2 \sigma^2)`
            (:func:`~graphattn.rbf_attention`); or "krause", the same within a window or among the
            nearest (Krause Synchronization Transformers).
        window: how far tokens see: in a causal model the last `window` keys, including its own; in
            others `window` tokens on each side. The mask of the model still applies.
        top_k: how many keys every query sees in each head: those with the largest logits.
        sigma: bandwidth of "rbf" and "krause". None means ``scaling ** -0.5`` of the layer: logits
            then differ from the model's own only by the squared lengths of queries and keys.
        graph: a function of (num_targets, num_sources) that returns a TokenGraph of these sizes,
            which is intersected with the mask. The targets are the last of the sources. For new
            tokens with a cache, the function may also return the graph of all num_sources tokens.
        layers: numbers of attention modules, such as ``range(4, 12)``; negative numbers count from
            the end. None means all, but without cross-attention if there is a window or graph.

    Returns:
        The numbers of the layers that were configured.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.
            Nothing is changed then.

    Warns:
        UserWarning: if some attention modules do not use transformers' interface; these do not
            change.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from graphattn.integrations import transformers as gat
        >>> config = LlamaConfig(
        ...     vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> gat.configure(model, mixer="krause", window=16, top_k=4, layers=range(2, 4))
        [2, 3]
        >>> model(torch.randint(50, (2, 20))).logits.shape
        torch.Size([2, 20, 50])
    """
    options = checked_options(mixer, window, top_k, sigma, graph)
    inside = unwrapped(model)
    if steps_of(inside.config) and not is_marked(inside):
        raise ValueError(
            "model.config.graphattn contains changes that were not made to this model: load the "
            "model with graphattn.integrations.transformers.from_pretrained, or set "
            "model.config.graphattn = None to start without them. If two models share one config "
            "object, make each from its own copy"
        )
    numbers = apply(inside, options, layers)
    step = {**vars(options), "layers": numbers, "modules": len(attention_modules(inside))}
    add_step(inside, "configure", step | {"graph": None if graph is None else GRAPH})
    mark(inside)
    _warn_of_others(inside)
    return numbers


def configured(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """Return the changes of this package to the attention of a model, by names of modules.

    Args:
        model: a model of transformers. It can be compiled, have adapters of peft, or be wrapped in
            DDP or FSDP.

    Returns:
        For every changed attention module a list of changes: the `call` ("configure", which comes
            first, "convert" or "add_krause_shortcut") and its arguments without those that are
            None. A `graph` is the function itself. Layers that a later call of :func:`configure`
            has reset to the plain dot product are not included.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from graphattn.integrations import transformers as gat
        >>> model = BertModel(BertConfig(
        ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=64))
        >>> gat.configure(model, window=8, layers=[0])
        [0]
        >>> gat.convert(model, mixer="gka", layers=[2])
        [2]
        >>> for name, done in gat.configured(model).items():
        ...     print(name, done)
        encoder.layer.0.attention.self [{'call': 'configure', 'mixer': 'dot', 'window': 8}]
        encoder.layer.2.attention.self [{'call': 'convert', 'mixer': 'gka'}]
    """
    inside = unwrapped(model)
    changes: dict[str, list[dict[str, Any]]] = {}
    for number, (name, module) in enumerate(attention_modules(inside)):
        options = getattr(module, "graphattn_options", AS_IT_IS)
        steps = [] if options == AS_IT_IS else [{"call": "configure", **vars(options)}]
        for step in steps_of(inside.config):
            layers = step.get("layers")
            if step["call"] != "configure" and (layers is None or number in layers):
                steps.append({key: step[key] for key in step if key != "layers"})
        if steps:
            changes[name] = [
                {key: value for key, value in step.items() if value is not None} for step in steps
            ]
    return changes


def replay_configure(
    model: Any,
    *,
    layers: Any,
    mixer: str = "dot",
    window: int | None = None,
    top_k: int | None = None,
    sigma: float | None = None,
    graph: GraphOf | None = None,
    modules: int | None = None,
) -> None:
    """Repeat a call of :func:`configure` from a config."""
    count = len(attention_modules(model))
    if modules not in (None, count):
        raise ValueError(
            f"config.graphattn was written for a model of {modules} attention modules, but "
            f"{type(model).__name__} has {count}: only a part of this model was configured, or a "
            "model of another class. Load it with transformers, set model.config.graphattn = "
            "None, and configure the whole model"
        )
    apply(model, checked_options(mixer, window, top_k, sigma, graph), layers)


def apply(model: Any, options: Any, layers: Any) -> list[int]:
    """Set the options and the implementation of a model, all or none, without changing its
    config."""
    register()
    numbers = layers_for(model, options, layers)
    if model.config._attn_implementation != NAME and not _can_change(model):
        raise ValueError(
            f"model must be made with attn_implementation={NAME!r} (an argument of from_pretrained "
            "and from_config): this version of transformers cannot change the attention of a "
            f"{type(model).__name__} later, got {model.config._attn_implementation!r}"
        )
    configs = [model.config, *(module.config for _, module in _with_config(model))]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        if any(name != NAME for _, name in before):
            model.set_attn_implementation(NAME)
        for name, module in _with_config(model):
            if module.config._attn_implementation != NAME:
                raise ValueError(
                    f"model must accept attn_implementation={NAME!r} in all of its attention "
                    f"modules, but {name} ({type(module).__name__}) still has "
                    f"{module.config._attn_implementation!r}"
                )
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        raise
    give_options(model, options, numbers)
    return numbers


def _with_config(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in attention_modules(model)
        if getattr(module, "config", None) is not None
    ]


OWN = ("softmax", "scaled_dot_product_attention")  # functions of a module's own attention


def _warn_of_others(model: nn.Module) -> None:
    """Warn about modules with their own code for attention, which cannot be changed."""
    others = [
        name
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower()
        and not is_attention(module)
        and any(
            word in getattr(type(module).forward, "__code__", _NO_CODE).co_names for word in OWN
        )
    ]
    if others:
        warn_caller(
            f"{len(others)} attention modules do not use transformers' attention interface and are "
            f"not changed: {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}",
        )


_NO_CODE = compile("", "", "exec")


def _can_change(model: Any) -> bool:
    """Return whether `set_attn_implementation` works, rather than only warn."""
    can = getattr(model, "_can_set_attn_implementation", None)
    return can is None or bool(can())


INSIDE = ("_orig_mod", "module", "get_base_model")  # torch.compile; DDP, FSDP, DeepSpeed; peft


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside torch.compile, DDP, FSDP, DeepSpeed or PEFT.

    Raises:
        ValueError: if there is none.
    """
    inside = model
    while not isinstance(inside, PreTrainedModel):
        inner = _inner(inside)
        if inner is None:
            raise ValueError(
                "model must be a model of transformers that uses its attention interface (it can "
                "be compiled, have adapters of peft, or be wrapped in DDP or FSDP), got "
                f"{type(model)}; for nn.MultiheadAttention in modules of PyTorch use "
                "graphattn.integrations.torch.convert"
            )
        inside = inner
    return inside


def _inner(model: Any) -> Any:
    for name in INSIDE:
        inner = getattr(model, name, None)
        if name == "get_base_model" and callable(inner):
            inner = inner()
        if isinstance(inner, nn.Module) and inner is not model:
            return inner
    return None
