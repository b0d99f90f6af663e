"""Replace attention modules by others, with fewer or different projections."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from graphattn.graphs.arguments import as_int
from graphattn.integrations.hooks import move_hooks
from graphattn.integrations.transformers.conversion.families import (
    FAMILIES,
    Family,
    family_of,
    missing_parts,
)
from graphattn.integrations.transformers.conversion.mixers import (
    Consensus,
    Krause,
    ReplacedByGaussianKernel,
    ValueLess,
)
from graphattn.integrations.transformers.conversion.modules import (
    attention_modules,
    is_cross_attention,
    is_replacement,
)
from graphattn.integrations.transformers.conversion.replacement import (
    Replacement,
    heads_of,
    key_heads_of,
)
from graphattn.integrations.transformers.files.saving import mark
from graphattn.integrations.transformers.options import (
    AS_IT_IS,
    add_step,
    chosen_layers,
)
from graphattn.near_names import did_you_mean

MIXERS: dict[str, type[Replacement]] = {
    mixer.mixer: mixer for mixer in (ReplacedByGaussianKernel, ValueLess, Consensus, Krause)
}


def convert(
    model: nn.Module,
    mixer: str,
    layers: Iterable[int] | None = None,
    **options: Any,
) -> list[int]:
    r"""Replace attention modules of a Hugging Face model by ones with fewer, or other, parameters.

    =============== =====================================================================
    `mixer`         what takes the place of attention
    =============== =====================================================================
    ``"gka"``       Gaussian kernel attention: queries, keys and values are the heads'
                    slices of the hidden states; a bandwidth per head is learned
                    (Projection-Free Transformers, Eq. 3-5)
    ``"vlt"``       softmax attention with the model's queries and keys; values are slices
                    of the hidden states (the same paper, Table 5)
    ``"krause"``    the model's own projections; weights by distance, with a bandwidth per
                    head that is learned, in a window, among the `top_k` nearest (Krause
                    Synchronization Transformers)
    ``"consensus"`` one step towards the tokens that are seen, by a learned matrix per edge
                    (Stabilizing Transformer Training Through Consensus, Algorithms 1 to 3)
    =============== =====================================================================

    The model keeps its output projection, its masks (padding, sliding windows, packed sequences),
    its caches, and its dropout (consensus has no weights to drop). Weights that a mixer does not
    use are removed. All layers are checked before the first is replaced. The call is stored in
    ``model.config.graphattn``, from which
    :func:`~graphattn.integrations.transformers.from_pretrained` makes the model again.

    In a model with rotary positions, the model's own cosines and sines rotate the features of
    "gka", including values (Eq. 11 of its paper), and the states that "consensus" compares;
    otherwise, both layers would not depend on positions. They then depend on absolute positions,
    not only on differences, because averages of rotated values, and states under matrices that are
    not rotated, also rotate. "gka" without ``normalize=True`` uses the hidden states as they come
    from the normalisation of the block.

    Fine-tune the model afterwards, because the other weights were trained with another mechanism.
    PEFT freezes new parameters unless ``LoraConfig(modules_to_save=["bandwidth"])`` names their
    module ("bandwidth" contains `log_sigma`; consensus has "edge_net" and "source_proj"). The
    Trainer of transformers applies weight decay to `log_sigma` unless you pass an optimizer made
    with :func:`graphattn.train.parameter_groups`.

    Args:
        model: a model of transformers.
        mixer: "gka", "vlt", "krause" or "consensus".
        layers: numbers of attention modules, such as ``range(4, 12)``; negative numbers count from
            the end. None for all. Cross-attention cannot be converted.
        **options: `window`, for every mixer: how far a token sees, in addition to the model's own
            mask: in a causal model the last `window` tokens including itself, in others `window`
            tokens on each side. None for no limit, which is the default, except for consensus (two
            tokens on each side, or before). Further options:

            - "gka": `init_sigma`, sqrt(D) if None; `normalize`, parameter-free RMS norm per head;
              `eps` in the denominator (Eq. 4); `rope`, whether the model's rotation is applied
              (None: if there is one).
            - "vlt": `top_k`, how many sources every target sees in each head.
            - "krause": `top_k`; `init_sigma`, ``scaling ** -0.5`` of the layer if None, so that
              logits differ from the model's only by squared lengths; `sigma_per_head`.
            - "consensus": `rank`, `edge_hidden`, `edge_input`, `edge_networks`, `trunk` as in
              :class:`~graphattn.nn.SelfConsensus`; `step_size`, a number or "auto" (the default,
              which never overshoots); `update`, "energy" or "target" (None: "target" in a causal
              model, which needs it, else "energy"); `rope`, True (Eq. 42), False or "isometric"
              (also for None).

    Returns:
        The numbers of the layers that were replaced.

    Raises:
        ValueError: if the family of the model is not known, if a layer does not have what the mixer
            needs (the same number of query and key heads, heads that fill the hidden size), or if
            the mixer does not have an option. Nothing is changed then.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from graphattn.integrations import transformers as gat
        >>> config = BertConfig(vocab_size=50, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=4, num_attention_heads=4)
        >>> model = BertForMaskedLM(config)
        >>> before = model.num_parameters()
        >>> gat.convert(model, mixer="gka", layers=range(2, 4))
        [2, 3]
        >>> before - model.num_parameters()  # 2 layers: 3 projections 32 x 32 + 32, less 4 sigmas
        6328
        >>> model(torch.randint(50, (2, 20))).logits.shape
        torch.Size([2, 20, 50])
    """
    numbers = replay_convert(model, mixer=mixer, layers=layers, **options)
    add_step(model, "convert", {"mixer": mixer, "layers": numbers, **options})
    mark(model)
    return numbers


def replay_convert(model: nn.Module, *, mixer: str, layers: Any, **options: Any) -> list[int]:
    """Replace the chosen modules, all or none, without changing the config."""
    if mixer not in MIXERS:
        raise ValueError(
            f"mixer must be one of {', '.join(map(repr, MIXERS))}, got {mixer!r}"
            f"{did_you_mean(mixer, MIXERS)} (for mixers that "
            "keep all projections, such as 'dot' and 'rbf', use configure())"
        )
    check_options(mixer, options)
    numbers = chosen_layers(model, layers)
    modules = attention_modules(model)
    made: list[tuple[str, Replacement]] = []
    for number in numbers:
        name, module = modules[number]
        where = f"layer {number} ({name}, {type(module).__name__})"
        family = checked_family(name, module, where)
        check_needs(mixer, module, family, where)
        try:
            made.append((name, MIXERS[mixer](module, family, **options)))
        except ValueError as error:
            raise ValueError(f"{error} (in {where})") from None
    for name, module in made:
        move_hooks(model.get_submodule(name), module)
        model.set_submodule(name, module)
    return numbers


def check_options(mixer: str, options: dict[str, Any]) -> None:
    """Check that a mixer has these options, and that a config can store them."""
    parameters = inspect.signature(MIXERS[mixer].__init__).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name, value in options.items():
        if name not in known:
            raise ValueError(
                f"{name} must be one of the options of mixer={mixer!r}, {known}, got "
                f"{name}={value!r}{did_you_mean(name, [*known, 'layers'])}"
            )
    if options.get("window") is not None:
        as_int("window", options["window"], 1)


def checked_family(name: str, module: nn.Module, where: str) -> Family:
    """Return the family of a module, or raise a ValueError if it cannot be converted."""
    if is_replacement(module):
        mixer = getattr(module, "mixer", None)
        raise ValueError(
            f"layers must be attention modules of the model itself, but {where} is already "
            f"converted to {mixer!r}"
        )
    if "forward" in vars(module):
        raise ValueError(
            f"{where} has its own forward, as accelerate sets it in models on several devices, "
            "which would bypass the conversion: convert the model before that, or let "
            "from_pretrained of this package do both"
        )
    if is_cross_attention(name, module):
        raise ValueError(
            f"layers must not include cross-attention, which reads another sequence, got {where}: "
            "choose other layers with layers="
        )
    if getattr(module, "graphattn_options", AS_IT_IS) != AS_IT_IS:
        raise ValueError(
            f"{where} has options from configure(), which would be lost: convert only layers that "
            "are not configured, and pass window= to convert() instead"
        )
    family = family_of(module)
    if family is None:
        raise ValueError(
            f"layers must be of a class that convert() knows ({', '.join(FAMILIES)}), got "
            f"{type(module).__name__} in {where}: use configure(), which works for it"
        )
    missing = missing_parts(module, family)
    if missing:
        raise ValueError(
            f"{where} has no {missing}, which its class has in all supported versions of "
            "transformers"
        )
    return family


def check_needs(mixer: str, module: nn.Module, family: Family, where: str) -> None:
    """Check that a layer has the parts that a mixer needs."""
    if mixer == "krause":
        return
    heads, head_dim = heads_of(module, family), int(getattr(module, family.head_dim))
    hidden = int(module.config.hidden_size)  # type: ignore[union-attr, arg-type]
    if heads * head_dim != hidden:
        raise ValueError(
            f"mixer={mixer!r} needs heads * head_dim to equal the hidden size, because heads mix "
            f"slices of the hidden states, but {where} has {heads} heads of {head_dim} features "
            f"and a hidden size of {hidden}"
        )
    key_heads = key_heads_of(module, family)
    if mixer == "vlt" and key_heads != heads:
        raise ValueError(
            f"mixer={mixer!r} needs as many key heads as query heads, because values are slices of "
            f"the hidden states, one per query head, but {where} has {heads} query heads and "
            f"{key_heads} key heads (grouped-query attention): use 'gka', 'krause' or 'consensus'"
        )
    reads = [family.value] if mixer == "consensus" or (mixer == "vlt" and family.fused) else []
    for name in reads:
        if type(getattr(module, name)) not in (nn.Linear, Conv1D):
            raise ValueError(
                f"mixer={mixer!r} copies the weights of {name}, which must be an nn.Linear or "
                f"Conv1D, but in {where} it is a {type(getattr(module, name))}: convert before "
                "adding adapters or quantising"
            )
