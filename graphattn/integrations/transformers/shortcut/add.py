"""Add a Krause shortcut to the attention layers of a pretrained language model."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn

from graphattn.graphs.arguments import as_float, as_int
from graphattn.integrations.transformers.conversion.modules import attention_modules
from graphattn.integrations.transformers.files.saving import mark
from graphattn.integrations.transformers.options import add_step, chosen_layers
from graphattn.integrations.transformers.shortcut.layer import (
    KrauseShortcut,
    after_attention,
    before_attention,
    refuse_implementation,
)

FAMILIES = {
    "LlamaAttention": "Llama",
    "MistralAttention": "Mistral",
    "Qwen2Attention": "Qwen 2",
    "Qwen3Attention": "Qwen 3",
}
PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj"
TRAINED_DIRECTLY = "bandwidth", "gate"  # parts that are trained directly, in addition to adapters
ADAPTER = "default"


def add_krause_shortcut(
    model: nn.Module,
    *,
    window: int = 32,
    top_k: int | None = 16,
    lora_rank: int | None = 16,
    lora_alpha: int = 32,
    init_sigma: float = 5.5,
    layers: Any = None,
) -> list[int]:
    r"""Add Krause attention in parallel to the attention of every layer of Llama, Mistral or Qwen.

    .. math::
        z_i = g_i^{(1)} \, \mathrm{attention}(x)_i + g_i^{(2)} \, \mathrm{krause}(x)_i, \qquad
        g_i = \mathrm{softmax}(W [\mathrm{attention}(x)_i; \mathrm{krause}(x)_i] + b)

    Krause attention is computed by :func:`~graphattn.rbf_attention`: every token averages the
    `top_k` nearest of the last `window` tokens, by the distance of rotated queries and keys and a
    learned bandwidth per head. At the start, its four projections are copies of those of the layer,
    W is 0 and b is (ln 4, 0), so the output is 0.8 of the layer's own attention plus 0.2 of the
    shortcut (Krause Synchronization Transformers, Section "Loss & Training": a shortcut in parallel
    with standard attention in each layer, both adapted with LoRA).

    The shortcut sees what the mask of the model allows, and never later tokens, with each of the
    attention implementations "eager", "sdpa", "flex_attention" and "graphattn". It supports padding
    on either side, packed texts, windows and caches. Its keys and values are stored in the cache of
    the model as additional heads, so beam search, assisted generation and static caches work; the
    cache needs twice the memory.

    The modules are called `krause`, inside the attention layers. With ``lora_rank=None`` no
    parameter of the model changes its name; with adapters, peft renames the projections, for
    instance to ``q_proj.base_layer.weight``. `output_attentions` returns the weights of the layer's
    own attention.

    Args:
        model: a language model of transformers, without PEFT; it is changed in place.
        window: W, the number of tokens that a token sees, itself included.
        top_k: how many of these it averages, the nearest ones; None for all.
        lora_rank: rank of the adapters (LoRA) of
            all eight projections of every chosen layer. Only these, the bandwidths and the gates
            are then trained. It needs the peft library. With None there are no adapters: the
            shortcut itself is trained, and the model's own weights are trainable or frozen as
            before.
        lora_alpha: the adapters are multiplied by lora_alpha / lora_rank.
        init_sigma: initial bandwidth of every head (5.5 in the paper's language models).
        layers: numbers of attention layers, such as ``range(4, 12)``; negative numbers count from
            the end. None for all.

    Returns:
        The numbers of the layers that got a shortcut.

    Raises:
        ValueError: if an argument is not allowed, if a layer is of another family or already has a
            shortcut, or if the attention implementation passes no mask. Nothing is changed then.
        ImportError: if `lora_rank` is given and peft is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from graphattn.integrations import transformers as gat
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2))
        >>> gat.add_krause_shortcut(model, window=8, top_k=4, lora_rank=None)
        [0, 1]
        >>> model.model.layers[0].self_attn.krause.gate.bias.softmax(-1).detach()
        tensor([0.8000, 0.2000])
    """
    options: dict[str, Any] = {
        "window": as_int("window", window, 1),
        "top_k": None if top_k is None else as_int("top_k", top_k, 1),
        "lora_rank": None if lora_rank is None else as_int("lora_rank", lora_rank, 1),
        "lora_alpha": as_int("lora_alpha", lora_alpha, 1),
        "init_sigma": as_float("init_sigma", init_sigma, positive=True),
    }
    numbers = replay_krause_shortcut(model, **options, layers=layers)
    add_step(model, "add_krause_shortcut", {**options, "layers": numbers})
    mark(model)
    return numbers


def replay_krause_shortcut(
    model: Any,
    *,
    window: int,
    top_k: int | None,
    lora_rank: int | None,
    lora_alpha: int,
    init_sigma: float,
    layers: Any,
) -> list[int]:
    """Repeat a call of :func:`add_krause_shortcut` from a config."""
    numbers = _checked_layers(model, layers)
    if lora_rank is not None:
        _check_peft(model, lora_rank)
    modules = attention_modules(model)
    chosen: list[tuple[str, Any]] = [modules[number] for number in numbers]
    for _, attention in chosen:
        shortcut = KrauseShortcut(attention, window=window, top_k=top_k, init_sigma=init_sigma)
        attention.krause = shortcut.train(attention.training)
        attention.register_forward_pre_hook(before_attention, with_kwargs=True)
        attention.register_forward_hook(after_attention, with_kwargs=True)
    if lora_rank is not None:
        _add_adapters(model, [name for name, _ in chosen], lora_rank, lora_alpha)
    return numbers


def _checked_layers(model: Any, layers: Any) -> list[int]:
    """Return the numbers of the modules in `layers`, after checking that all can be changed."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a model of transformers without PEFT, got {type(model).__name__}: add "
            "the shortcut before adapters"
        )
    numbers = chosen_layers(model, layers)
    modules = attention_modules(model)
    for number in numbers:
        _check_layer(*modules[number])
    return numbers


def _check_layer(name: str, attention: Any) -> None:
    kind = type(attention)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        raise ValueError(
            f"model must have attention layers of {', '.join(FAMILIES.values())}, got "
            f"{kind.__name__} in {name}"
        )
    if hasattr(attention, "krause"):
        raise ValueError(f"layers must not have a Krause shortcut yet, but {name} has one")
    for projection in PROJECTIONS:
        layer = getattr(attention, projection)
        if type(layer) is not nn.Linear:
            raise ValueError(
                "model must have plain nn.Linear projections, which are copied, got "
                f"{type(layer).__name__} in {name}.{projection}: add the shortcut before adapters "
                "or quantisation"
            )
    refuse_implementation(attention)


def _check_peft(model: Any, lora_rank: int) -> None:
    if importlib.util.find_spec("peft") is None:
        raise ImportError(
            f"lora_rank = {lora_rank} needs the peft library: install it with pip install "
            "'graphattn[lora]', or use lora_rank=None, which trains the shortcut without adapters"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"lora_rank must be None if the model already has adapters of PEFT, got {lora_rank}: "
            "choose all layers in one call, or add adapters to the shortcut with PEFT"
        )


def _add_adapters(model: Any, names: list[str], rank: int, alpha: int) -> None:
    """Add LoRA to all projections of these layers; bandwidths and gates are trained directly."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.functional import cast_adapter_dtype

    of_layer = [f"{name}.{projection}" for name in names for projection in PROJECTIONS]
    beside = [f"{name}.krause.{projection}" for name in names for projection in PROJECTIONS]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=of_layer + beside,
        # Otherwise PEFT would freeze them without a warning, like everything that is not an
        # adapter.
        modules_to_save=[f"{name}.krause.{kept}" for name in names for kept in TRAINED_DIRECTLY],
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    cast_adapter_dtype(model, ADAPTER)  # to float32 in a model of half precision, as PEFT does
