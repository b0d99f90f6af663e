"""The call that replaces attention modules by others, where projections disappear or change."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from graphattn.graphs.arguments import as_int
from graphattn.integrations.hooks import move_hooks
from graphattn.integrations.transformers.conversion.agreement import Consensus
from graphattn.integrations.transformers.conversion.families import (
    FAMILIES,
    Family,
    family_of,
    missing_parts,
)
from graphattn.integrations.transformers.conversion.mixers import (
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
from graphattn.integrations.transformers.files.marks import mark
from graphattn.integrations.transformers.options import (
    AS_IT_IS,
    add_step,
    chosen_layers,
)

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

    What stays is the model's: its output projection, its masks (padding, sliding windows, packed
    sequences), its caches, and its dropout (consensus has no weights to drop). Weights that a mixer
    does not use are gone from the model. All layers are checked before the first is replaced. The
    call is written into ``model.config.graphattn``, from which
    :func:`~graphattn.integrations.transformers.from_pretrained` makes the model again.

    In a model with rotary positions the model's own cosines and sines turn the features of "gka",
    values included (Eq. 11 of its paper), and the states that "consensus" compares; both layers
    would otherwise know nothing of positions. Both then know absolute positions, not differences
    alone: averages of turned values turn with them, and so do states under matrices that do not.
    "gka" without ``normalize=True`` takes the hidden states as the block's normalisation hands them
    on.

    Fine-tune afterwards: the other weights were trained for something else. PEFT freezes new
    parameters unless ``LoraConfig(modules_to_save=["bandwidth"])`` names their module ("bandwidth"
    holds `log_sigma`; consensus has "edge_net" and "source_proj"), and transformers' Trainer
    applies its weight decay to `log_sigma` unless it is given an optimizer made of
    :func:`graphattn.train.parameter_groups`.

    Args:
        model: a model of transformers.
        mixer: "gka", "vlt", "krause" or "consensus".
        layers: numbers of attention modules, as in ``range(4, 12)``, negative ones from the end;
            all if None. Cross-attention cannot be converted.
        **options: `window`, for every mixer: what a token sees within the model's own mask, the
            last `window` tokens, itself counted, of a causal model, and `window` on each side of
            others; None for no limit, which is the default but for consensus (two tokens on each
            side, or before). Further:

            - "gka": `init_sigma`, sqrt(D) if None; `normalize`, parameter-free RMS norm per head;
              `eps` in the denominator (Eq. 4); `rope`, whether the model's rotation is applied
              (None: where there is one).
            - "vlt": `top_k`, how many sources every target keeps in each head.
            - "krause": `top_k`; `init_sigma`, ``scaling ** -0.5`` of the layer if None, with which
              logits differ from the model's by squared lengths alone; `sigma_per_head`.
            - "consensus": `rank`, `edge_hidden`, `edge_input`, `trunk` as in
              :class:`~graphattn.nn.SelfConsensus`; `step_size`, a number or "auto" (the default,
              which never overshoots); `update`, "energy" or "target" (None: "target" where the
              model is causal, which needs it); `rope`, "isometric" where None, True (Eq. 42) or
              False.

    Returns:
        The numbers of the layers that were replaced.

    Raises:
        ValueError: names the argument, its value and what is allowed: for a family that is not
            known, for a mixer that needs what a layer lacks (equally many query and key heads,
            heads that fill the hidden size), and for options that the mixer does not have. Nothing
            is changed then.

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
    numbers = replace(model, mixer, layers, options)
    add_step(model, "convert", {"mixer": mixer, "layers": numbers, **options})
    mark(model)
    return numbers


def replay_convert(model: nn.Module, *, mixer: str, layers: Any, **options: Any) -> None:
    """:func:`convert` as a config keeps it."""
    replace(model, mixer, layers, options)


def replace(model: nn.Module, mixer: str, layers: Any, options: dict[str, Any]) -> list[int]:
    """Replace the chosen modules, all or none of them, without writing it down."""
    if mixer not in MIXERS:
        raise ValueError(
            f"mixer must be one of {', '.join(map(repr, MIXERS))}, got {mixer!r} (mixers that keep "
            "a layer as it is, such as 'dot' and 'rbf', are for configure())"
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
    """Options must be of this mixer, and such that a config can hold them."""
    parameters = inspect.signature(MIXERS[mixer].__init__).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"mixer={mixer!r} has the options {known}, got {name}={value!r}")
    if options.get("window") is not None:
        as_int("window", options["window"], 1)


def checked_family(name: str, module: nn.Module, where: str) -> Family:
    """Return the family of a module, or refuse to convert it."""
    if is_replacement(module):
        mixer = getattr(module, "mixer", None)
        raise ValueError(f"layers must be attention of the model itself: {where} is {mixer!r} now")
    if "forward" in vars(module):
        raise ValueError(
            f"{where} has a forward of its own, as accelerate gives to models that it spreads over "
            "devices, which would go round the conversion: convert the model before, or let "
            "from_pretrained of this package do both"
        )
    if is_cross_attention(name, module):
        raise ValueError(
            f"layers must not include cross-attention, which reads another sequence: {where}; "
            "name the others with layers="
        )
    if getattr(module, "graphattn_options", AS_IT_IS) != AS_IT_IS:
        raise ValueError(
            f"{where} was given options by configure(), which would be lost: convert layers that "
            "are not configured, and give convert() a window= of its own"
        )
    family = family_of(module)
    if family is None:
        raise ValueError(
            f"convert() does not know how {type(module).__name__} is built; configure() works for "
            f"it ({where}). convert() knows {', '.join(FAMILIES)}"
        )
    missing = missing_parts(module, family)
    if missing:
        raise ValueError(f"{where} lacks {missing}, which its family has in the versions known")
    return family


def check_needs(mixer: str, module: nn.Module, family: Family, where: str) -> None:
    """Check that a layer has the parts that a mixer needs."""
    if mixer == "krause":
        return
    heads, head_dim = heads_of(module, family), int(getattr(module, family.head_dim))
    hidden = int(module.config.hidden_size)  # type: ignore[union-attr, arg-type]
    if heads * head_dim != hidden:
        raise ValueError(
            f"mixer={mixer!r} needs heads that fill the hidden states, since it mixes their slices:"
            f" {where} has {heads} heads of {head_dim} features, and a hidden size of {hidden}"
        )
    key_heads = key_heads_of(module, family)
    if mixer == "vlt" and key_heads != heads:
        raise ValueError(
            f"mixer={mixer!r} needs as many key heads as query heads, since values are slices of "
            f"the hidden states, one for every query head: {where} has {heads} and {key_heads} "
            "(grouped-query attention); use 'gka', 'krause' or 'consensus'"
        )
    reads = [family.value] if mixer == "consensus" or (mixer == "vlt" and family.fused) else []
    for name in reads:
        if type(getattr(module, name)) not in (nn.Linear, Conv1D):
            raise ValueError(
                f"mixer={mixer!r} copies weights of {name} in {where}, which is a "
                f"{type(getattr(module, name))}: convert before adapters or quantisation"
            )
