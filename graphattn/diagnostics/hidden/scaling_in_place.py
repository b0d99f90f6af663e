"""Scaling queries in place, when queries, keys, values and the residual are one tensor."""

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
    """Simulate ``query /= sqrt(D)`` in a model without projections, inside the context.

    The projections of `layers` return their input, not a copy. The query projection divides it by
    sqrt(D) in place first, so keys and values are scaled, too, and also the residual, if the block
    adds to the same tensor. Only the query is a new tensor, which is multiplied by sqrt(D) again,
    because the model divides the product by sqrt(D) itself. If the code of a model scales its
    queries in place (as in Longformer), its projections only return their input.

    Raises:
        ValueError: if a layer has no query projection, or the width of its heads is unknown.
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
                    hook = module.register_forward_hook(_return_input(root))
                elif is_attention_layer(module) and not hasattr(module, "query_proj"):
                    raise ValueError(
                        "scaling must not be 'sq_inplace' unless attention uses dot products and "
                        f"query projections, got {type(module).__name__} ({name!r})"
                    )
                else:
                    continue
                stack.callback(hook.remove)
            if not scaled:
                raise ValueError(
                    "scaling must not be 'sq_inplace' unless every layer has a query projection "
                    f"(named query, q_proj, ...), but {layer_name!r} has none"
                )
        yield


def _return_input(root: float | None) -> Any:
    """Make a forward hook that returns the input; for a query, it is divided in place first."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> Tensor:
        x = args[0]
        return x if root is None else x.div_(root) * root

    return hook


def _scale_all(root: float) -> Any:
    """Make a hook that scales the arguments query, key and value of torch's attention."""

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
    except (OSError, TypeError):  # The class was defined at a prompt, so it has no source file.
        return False


def _root(attention: nn.Module, projection: nn.Linear) -> float:
    """Return sqrt(D) of an attention module, from its attributes for D or for heads."""
    for name in ("head_dim", "attention_head_size"):
        if isinstance(D := getattr(attention, name, None), int):
            return math.sqrt(D)
    config = getattr(attention, "config", None)
    for owner in (attention, config):
        for name in ("num_heads", "num_attention_heads", "n_heads", "heads"):
            if isinstance(heads := getattr(owner, name, None), int):
                return math.sqrt(projection.out_features // heads)
    raise ValueError(
        "scaling must not be 'sq_inplace' unless the width of a head is known, but "
        f"{type(attention).__name__} has neither an attribute head_dim nor num_heads"
    )
