"""Changes of a model for one measurement: parts disabled, or queries scaled in place."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.diagnostics.attention.calls import Watcher, watching
from graphattn.diagnostics.attention.record import is_attention_layer
from graphattn.diagnostics.hidden.evaluating import evaluating

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_NORM_NAME = re.compile("(RMS|Layer)Norm")
#: names of the linear maps of attention in transformers
_OF_TRANSFORMERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("q_lin", "k_lin", "v_lin", "out_lin"),
    *("query", "key", "value", "attention.output.dense"),
    *("query_global", "key_global", "value_global"),
)
_QUERY = re.compile(r"(^|\.)(query|query_proj|q_proj|q_lin|q|to_q|wq|query_global)$")
_IN_PLACE = re.compile(r"quer\w*\s*[/*]=|quer\w*\.(div|mul)_\(")


# Learned weights and norms disabled.


def disabled_parameters(
    model: nn.Module, layers: dict[str, nn.Module], projections: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return replacements for the parameters of `layers`, by their names in the model.

    Attention projections become the identity. Norms get the scale 1 and the shift 0. Other linear
    maps (the MLP) become 0. Bandwidths and sinks get their initial values. Embeddings do not
    change.
    """
    replacements: dict[str, Tensor] = {}
    has_attention = False
    for layer_name, layer in layers.items():
        for inner, module in layer.named_modules():
            name = f"{layer_name}.{inner}".strip(".")
            parameters = dict(module.named_parameters(prefix=name, recurse=False))
            if not parameters or isinstance(module, nn.Embedding):
                continue
            if is_norm(module):
                adds_one = type(module).__name__.startswith("Gemma")  # scales by 1 + weight
                replacements |= _filled(parameters, 0.0 if adds_one else 1.0)
            elif isinstance(module, nn.MultiheadAttention):
                replacements |= _projections_in_one(name, parameters)
            elif isinstance(module, nn.Linear):
                is_projection = is_attention_projection(model, layer, name, projections)
                has_attention |= is_projection
                replacements |= (
                    _identity(name, parameters) if is_projection else _filled(parameters, 0.0)
                )
            elif is_attention_layer(module) and set(parameters) <= _at_start(name, module).keys():
                for key, number in _at_start(name, module).items():
                    if key in parameters:
                        replacements[key] = torch.full_like(parameters[key], number)
            else:
                raise ValueError(
                    "weights must be 'enabled' for layers without a form without parameters, such "
                    f"as {type(module).__name__} ({name!r}), got 'disabled'"
                )
    if not has_attention:
        raise ValueError(
            "projections must be the ends of the names of the attention's linear maps, such as "
            "('query', 'key'), because the layers have neither attention of graphattn.nn nor "
            f"torch.nn.MultiheadAttention, got {projections}, which match no linear map"
        )
    return replacements


def _at_start(name: str, layer: nn.Module) -> dict[str, float]:
    """Return the initial values of an attention layer's own parameters, by name."""
    initial = {f"{name}.sink".strip("."): 0.0}
    init_sigma: Any = getattr(layer, "init_sigma", None)
    if init_sigma is not None:
        initial[f"{name}.log_sigma".strip(".")] = math.log(init_sigma)
    return initial


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its name."""
    return isinstance(module, _NORMS) or bool(_NORM_NAME.search(type(module).__name__))


def is_attention_projection(
    model: nn.Module, layer: nn.Module, name: str, projections: tuple[str, ...]
) -> bool:
    """Whether the linear map of this name in the model is a projection of attention."""
    if type(layer).__module__.startswith("transformers."):
        projections = (*projections, *_OF_TRANSFORMERS)
    parent = model.get_submodule(name.rpartition(".")[0])
    return name.endswith(projections) or _is_attention(parent)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or is_attention_layer(module)


def _filled(parameters: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Fill weights with one number, and biases with 0."""
    return {
        name: torch.full_like(value, weight if name.endswith("weight") else 0.0)
        for name, value in parameters.items()
    }


def _identity(name: str, parameters: dict[str, Tensor], copies: int = 1) -> dict[str, Tensor]:
    """Return `copies` identity matrices below each other, and biases of 0."""
    replacements = {key: torch.zeros_like(value) for key, value in parameters.items()}
    for key, value in parameters.items():
        if value.dim() == 2:
            rows, columns = value.shape
            if rows != copies * columns:
                raise ValueError(
                    "weights must be 'enabled' unless projections are square, so that they can be "
                    f"replaced by the identity, got 'disabled' with {name!r} of shape "
                    f"{list(value.shape)}"
                )
            replacements[key].view(copies, columns, columns).diagonal(dim1=-2, dim2=-1).fill_(1)
    return replacements


def _projections_in_one(name: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the replacement of the projections of MultiheadAttention, which are one matrix."""
    known = {f"{name}.in_proj_weight".strip("."), f"{name}.in_proj_bias".strip(".")}
    if not set(parameters) <= known:
        raise ValueError(
            "weights must be 'enabled' unless the query, key and value projections of "
            "MultiheadAttention have the same width, without bias_k and bias_v, got 'disabled' "
            f"with {name!r}, which has {sorted(parameters)}"
        )
    return _identity(name, parameters, copies=3)


@contextmanager
def without_weights(
    model: nn.Module,
    layers: dict[str, nn.Module],
    weights: str,
    normalization: str,
    projections: Sequence[str],
) -> Iterator[dict[str, Tensor]]:
    """Set evaluation mode, and yield replacements of parameters if `weights` are "disabled".

    If `normalization` is "disabled", the norms of `layers` return their inputs inside the context.
    """
    disabled = weights == "disabled"
    parameters = disabled_parameters(model, layers, tuple(projections)) if disabled else {}
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if normalization == "disabled":
            for norm in {m for layer in layers.values() for m in layer.modules() if is_norm(m)}:
                stack.callback(norm.register_forward_hook(lambda _, args, __: args[0]).remove)
        yield parameters


# Attention disabled.


@contextmanager
def without_attention(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Disable the attention of these blocks inside the context, so that it adds 0 to every token.

    Attention layers of graphattn and torch return 0. All other attention calls return 0, including
    those of :mod:`graphattn.integrations` and its shortcuts. A linear map whose input is 0 also
    returns 0, because otherwise the bias of the output projection would be left.

    Raises:
        ValueError: at the end of the context, if no attention was observed in a block.
    """
    watcher = _AttentionDisabler(model, blocks)
    with ExitStack() as stack:
        for name, block in blocks.items():
            for part in block.modules():
                if _is_attention(part):
                    hook = part.register_forward_hook(watcher.disable_layer(name))
                elif isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
                    hook = part.register_forward_hook(_zero_of_zero)
                else:
                    continue
                stack.callback(hook.remove)
        stack.enter_context(watching(watcher))
        yield
    if enabled := [name for name in blocks if name not in watcher.disabled]:
        raise ValueError(
            "every block must make a known call of attention, which can be disabled, but none was "
            f"observed in {enabled[0]!r}, a {type(blocks[enabled[0]]).__name__}"
        )


class _AttentionDisabler(Watcher):
    """A watcher that replaces the outputs of attention calls in some blocks by zeros."""

    needs_operands = False

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        super().__init__(model)
        self.blocks = {id(block): name for name, block in blocks.items()}
        self.disabled: set[str] = set()

    def is_recorded_by_hooks(self, module: nn.Module) -> bool:
        return _is_attention(module)

    def replace_output(self, output: Tensor, name: str) -> Tensor:
        running = {id(module) for module in self.running}
        # A shortcut is called after its layer, so it is found by its name.
        inside = [
            block
            for number, block in self.blocks.items()
            if number in running or f"{name}.".startswith(f"{block}.")
        ]
        self.disabled.update(inside)
        return torch.zeros_like(output) if inside else output

    def disable_layer(self, block: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            self.disabled.add(block)
            if isinstance(output, tuple):
                return (torch.zeros_like(output[0]), *output[1:])
            return torch.zeros_like(output)

        return hook


def _zero_of_zero(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    return None if args[0].any() else torch.zeros_like(output)


# Queries scaled in place.


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
                        scaled = True
                        root = _root(model.get_submodule(name.rpartition(".")[0]), module)
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
        rest = dict(keywords)
        query, key, value = args[:3] + tuple(
            rest.pop(name) for name in ("query", "key", "value")[len(args) :]
        )
        return (query.div_(root) * root, key, value, *args[3:]), rest

    return hook


def _root(attention: nn.Module, projection: nn.Linear) -> float | None:
    """Return sqrt(D) of an attention module, from its attributes for D or for heads.

    None if the module scales its queries in place itself.
    """
    if getattr(attention, "scaling", None) == "sq_inplace":  # a DotProductAttention made so
        return None
    try:
        if _IN_PLACE.search(inspect.getsource(type(attention).forward)):
            return None
    except (OSError, TypeError):  # The class was defined at a prompt, so it has no source file.
        pass
    for name in ("head_dim", "attention_head_size"):
        if isinstance(D := getattr(attention, name, None), int):
            return math.sqrt(D)
    for owner in (attention, getattr(attention, "config", None)):
        for name in ("num_heads", "num_attention_heads", "n_heads", "heads"):
            if isinstance(heads := getattr(owner, name, None), int):
                return math.sqrt(projection.out_features // heads)
    raise ValueError(
        "scaling must not be 'sq_inplace' unless the width of a head is known, but "
        f"{type(attention).__name__} has neither an attribute head_dim nor num_heads"
    )
