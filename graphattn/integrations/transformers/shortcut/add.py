"""Add a Krause shortcut to the attention layers of a pretrained language model."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn

from graphattn.graphs.arguments import as_float, as_int
from graphattn.integrations.transformers.conversion.modules import attention_modules
from graphattn.integrations.transformers.files.marks import mark
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
KEPT = "bandwidth", "gate"  # what is trained itself beside adapters
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
    r"""Add Krause attention beside the attention of every layer of Llama, Mistral or Qwen.

    .. math::
        z_i = g_i^{(1)} \, \mathrm{attention}(x)_i + g_i^{(2)} \, \mathrm{krause}(x)_i, \qquad
        g_i = \mathrm{softmax}(W [\mathrm{attention}(x)_i; \mathrm{krause}(x)_i] + b)

    with Krause attention of :func:`~graphattn.rbf_attention`: every token averages the `top_k`
    nearest of the last `window` tokens, by the distance of rotated queries and keys and a learned
    bandwidth per head. Its four projections are copies of the layer's at the start, W is 0 and b is
    (ln 4, 0): the model starts with 0.8 of its own attention and 0.2 of the shortcut's (Krause
    Synchronization Transformers, Section "Loss & Training": a shortcut in parallel with standard
    attention in each layer, both adapted with LoRA).

    The shortcut sees what the model's own mask lets see, and never the future, whichever of the
    attention implementations "eager", "sdpa", "flex_attention" and "graphattn" is chosen: padding
    on either side, packed texts, windows, caches. Its keys and values lie in the model's own cache
    as further heads, so that beams, assisted generation and static caches need nothing else; such a
    cache takes twice the memory.

    The modules are called `krause`, inside the attention layers. With ``lora_rank=None`` no
    parameter of the model changes its name; with adapters peft renames the projections, as in
    ``q_proj.base_layer.weight``. `output_attentions` gives the weights of the layer's own
    attention.

    Args:
        model: a language model of transformers, changed in place, before it is given to PEFT.
        window: W, tokens that a token sees, itself included.
        top_k: the nearest of these that are kept; all if None.
        lora_rank: rank of the adapters (LoRA) of all eight projections of every chosen layer, which
            are then all that is trained, with bandwidths and gates; needs the peft library. None
            adds no adapters: the shortcut is trained itself, and whether the model's own weights
            are is left as it was.
        lora_alpha: adapters are scaled by lora_alpha / lora_rank.
        init_sigma: bandwidth of every head at the start (published for language models: 5.5).
        layers: numbers of attention layers, as in ``range(4, 12)``, negative ones from the end;
            all if None.

    Returns:
        The numbers of the layers that have a shortcut now.

    Raises:
        ValueError: names the argument, its value and what is allowed; for a layer of another
            family, one that has a shortcut, or an attention implementation without a mask. Nothing
            is changed then.
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
    """:func:`add_krause_shortcut` as a config keeps it."""
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
    """The numbers of the attention modules that `layers` names, all of which can be changed."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "model must be a model of transformers (and not yet one of PEFT), got "
            f"{type(model).__name__}"
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
            f"model must have attention layers of {_families()}, got {kind.__name__} in {name}"
        )
    if hasattr(attention, "krause"):
        raise ValueError(f"layers must be without a Krause shortcut, but {name} has one")
    for projection in PROJECTIONS:
        own = getattr(attention, projection)
        if type(own) is not nn.Linear:
            raise ValueError(
                "model must have plain projections, which are copied (adapters and quantisation "
                f"come after), got {type(own).__name__} in {name}.{projection}"
            )
    refuse_implementation(attention)


def _families() -> str:
    return ", ".join(FAMILIES.values())


def _check_peft(model: Any, lora_rank: int) -> None:
    if importlib.util.find_spec("peft") is None:
        raise ImportError(
            f"lora_rank = {lora_rank} needs the peft library (pip install peft); lora_rank=None "
            "trains the shortcut without adapters"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"lora_rank must be None where the model has adapters of PEFT, got {lora_rank}: choose "
            "all layers in one call, or add adapters to the shortcut with PEFT"
        )


def _add_adapters(model: Any, names: list[str], rank: int, alpha: int) -> None:
    """LoRA in all projections of these layers; bandwidths and gates are trained themselves."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.functional import cast_adapter_dtype

    own = [f"{name}.{projection}" for name in names for projection in PROJECTIONS]
    beside = [f"{name}.krause.{projection}" for name in names for projection in PROJECTIONS]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=own + beside,
        # Else they would be frozen with all that is not an adapter, without a word.
        modules_to_save=[f"{name}.krause.{kept}" for name in names for kept in KEPT],
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    cast_adapter_dtype(model, ADAPTER)  # to float32 in a model of half precision, as PEFT does
