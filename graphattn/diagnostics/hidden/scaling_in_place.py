"""Queries scaled in place, where queries, keys, values and the residual are one tensor."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from graphattn.diagnostics.attention.record import is_attention_layer
from graphattn.diagnostics.hidden.disabled import is_attention_projection

_QUERY = re.compile(r"(^|\.)(query|query_proj|q_proj|q_lin|q|to_q|wq|query_global)$")
_IN_PLACE = re.compile(r"quer\w*\s*[/*]=|quer\w*\.(div|mul)_\(")


@contextmanager
def queries_scaled_in_place(
    model: nn.Module, layers: dict[str, nn.Module], projections: tuple[str, ...]
) -> Iterator[None]:
    """Inside, attention does what ``query /= sqrt(D)`` does to a model without projections.

    The projections of `layers` hand their input on: not a copy, the tensor itself. The one of the
    query divides it by sqrt(D) first, in place, so keys, values and, where the block adds to the
    same tensor, the residual shrink with it. The query alone is a new tensor, multiplied by sqrt(D)
    again, because the model will divide the product by sqrt(D) itself. A model whose own code
    scales its queries in place (Longformer) gets the tensor itself and nothing else.

    Raises:
        ValueError: if a layer has no query projection of its own, or does not say its heads.
    """
    with ExitStack() as stack:
        for layer_name, layer in layers.items():
            scaled = False
            for inner, module in layer.named_modules():
                name = f"{layer_name}.{inner}".strip(".")
                if isinstance(module, nn.MultiheadAttention):
                    root = math.sqrt(module.head_dim)
                    hook = module.register_forward_pre_hook(_scale_all(root), with_kwargs=True)
                    scaled = True
                elif isinstance(module, nn.Linear) and is_attention_projection(
                    model, layer, name, projections
                ):
                    root = None
                    if _QUERY.search(name):
                        parent = model.get_submodule(name.rpartition(".")[0])
                        scaled = True
                        root = None if _scales_itself(parent) else _root(parent, module)
                    hook = module.register_forward_hook(_hand_on(root))
                elif is_attention_layer(module) and not hasattr(module, "query_proj"):
                    raise ValueError(
                        "scaling='sq_inplace' needs attention by dot products with query "
                        f"projections, got {type(module).__name__} ({name!r})"
                    )
                else:
                    continue
                stack.callback(hook.remove)
            if not scaled:
                raise ValueError(
                    "scaling='sq_inplace' needs a query projection in every layer (query, q_proj, "
                    f"...), found none in {layer_name!r}"
                )
        yield


def _hand_on(root: float | None) -> Any:
    """A forward hook: the output is the input itself, divided in place where it is the query."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> Tensor:
        x = args[0]
        return x if root is None else x.div_(root) * root

    return hook


def _scale_all(root: float) -> Any:
    """A hook before torch's attention, which is given query, key and value."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        names = ("query", "key", "value")
        given = dict(zip(names, args, strict=False)) | {
            name: keywords[name] for name in names if name in keywords
        }
        x = given["query"].div_(root)
        rest = {name: value for name, value in keywords.items() if name not in names}
        return (x * root, given["key"], given["value"], *args[3:]), rest

    return hook


def _scales_itself(attention: nn.Module) -> bool:
    """Whether the code of an attention module scales its queries in place."""
    try:
        return bool(_IN_PLACE.search(inspect.getsource(type(attention).forward)))
    except (OSError, TypeError):  # typed into a prompt
        return False


def _root(attention: nn.Module, projection: nn.Linear) -> float:
    """sqrt(D) of an attention module, by what models call D or their number of heads."""
    for name in ("head_dim", "attention_head_size"):
        if isinstance(D := getattr(attention, name, None), int):
            return math.sqrt(D)
    config = getattr(attention, "config", None)
    for owner in (attention, config):
        for name in ("num_heads", "num_attention_heads", "n_heads", "heads"):
            if isinstance(heads := getattr(owner, name, None), int):
                return math.sqrt(projection.out_features // heads)
    raise ValueError(
        "scaling='sq_inplace' needs the width of a head: head_dim or num_heads must be an "
        f"attribute of {type(attention).__name__}"
    )
