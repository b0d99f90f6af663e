"""A step of a block as one call of C++ code, for blocks made of known modules.

The code reads the parameters of modules itself. So it must not run where a module does something
else than torch's own: one with a hook, with a `forward` of its own, or of another class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch

from graphattn.nn.attention_steps import AttentionSteps
from graphattn.nn.base.overrides import is_ours
from graphattn.nn.blocks.parts import ReLU2
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.ops.attention.native.blocks import (
    GELU,
    LAYER_NORM,
    MOST_ROWS,
    RMS_NORM,
    SQUARED_RELU,
    block_step,
)
from graphattn.ops.backends import may_repeat_step

# The classes whose work C++ code does, and their methods as they are defined.
CLASSES: tuple[Any, ...] = nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.Sequential, ReLU2
FORWARD = {cls: cls.forward for cls in CLASSES}
ACTIVATIONS = {nn.GELU: GELU, ReLU2: SQUARED_RELU}
GLOBAL_HOOKS = (
    modules_of_torch._global_forward_hooks,
    modules_of_torch._global_forward_pre_hooks,
)
# Methods of a layer that do not run here; of others the layer itself notices an override.
SHORTENED = "step", "compiled_step", "compiled_row", "project_flat"
IDENTITY = 0, 0  # the numbers of a linear map that is not there


class UnknownModuleError(Exception):
    """A module whose work C++ code cannot do."""


class BlockRun:
    """Steps of a block by C++ code, of one token per text, for as long as nobody changes the block.

    Args:
        block: the block; its mixer is an attention layer.
        x: the tokens of a step, [*, dim].
        cache: of the block.

    Raises:
        UnknownModuleError: C++ code cannot run the block.
    """

    def __init__(self, block: Any, x: Tensor, cache: Any) -> None:
        mixer = block.mixer
        if not isinstance(mixer, AttentionSteps) or type(cache) is not LayerCache:
            raise UnknownModuleError
        if cache.shard is not None and cache.position == 0:  # a part of a prompt comes first
            raise UnknownModuleError
        if not all(is_ours(getattr(mixer, name)) for name in SHORTENED):
            raise UnknownModuleError
        if not is_readable(x) or not mixer.may_take_step(x, cache):
            raise UnknownModuleError
        self.mixer, self.cache = mixer, cache
        self.of_mixer = *norm_of(block.mixer_norm, x), *projections_of(mixer, x)
        self.of_perceptron = perceptron_of(block, x)

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of the next token of every text, [*, dim]."""
        mixer, cache = self.mixer, self.cache
        call = mixer.prepared_step(cache, x.dtype, None, mixer.angles_of_step(x, cache))
        return block_step(x.contiguous(), None, call, self.of_mixer, self.of_perceptron)


def perceptron_step(block: Any, x: Tensor, mixed: Tensor) -> Tensor | None:
    """The outputs of a block for few tokens [*, dim], whose mixer gave `mixed`.

    None if C++ code cannot compute them.
    """
    if mixed.shape != x.shape or mixed.dtype is not x.dtype:
        return None
    if not is_readable(x) or not is_readable(mixed) or not may_repeat_step("auto"):
        return None
    try:
        perceptron = perceptron_of(block, x)
    except UnknownModuleError:
        return None
    return block_step(x.contiguous(), mixed.contiguous(), None, None, perceptron)


def is_readable(x: Tensor) -> bool:
    """Whether C++ code may read x, and no mode or hook of torch watches all modules."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.numel() <= MOST_ROWS.get(x.dtype, 0) * x.shape[-1]
        and not x.is_neg()
        and not any(GLOBAL_HOOKS)
        and torch._C._len_torch_function_stack() == 0
        and not torch.is_autocast_enabled("cpu")
    )


def plain(module: Any, cls: Any) -> dict[str, Any]:
    """The parameters of a module that does what torch wrote its class for."""
    attributes = vars(module)
    if (
        type(module) is not cls
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or "forward" in attributes
        or cls.forward is not FORWARD[cls]
    ):
        raise UnknownModuleError
    parameters: dict[str, Any] = attributes["_parameters"]
    return parameters


def pointer(parameters: dict[str, Any], name: str, shape: tuple[int, ...], like: Tensor) -> int:
    """The address of a parameter, 0 for None."""
    if name not in parameters:
        raise UnknownModuleError  # a plain tensor may have taken its place
    parameter = parameters[name]
    if parameter is None:
        return 0
    if (
        parameter.dtype is not like.dtype
        or parameter.shape != shape
        or not parameter.is_contiguous()
        or not parameter.is_cpu
        or type(parameter) is not nn.Parameter
    ):
        raise UnknownModuleError
    address: int = parameter.data_ptr()
    return address


def linear_of(module: Any, outputs: int, inputs: int, like: Tensor) -> tuple[int, int]:
    parameters = plain(module, nn.Linear)
    weight = pointer(parameters, "weight", (outputs, inputs), like)
    if weight == 0:
        raise UnknownModuleError
    return weight, pointer(parameters, "bias", (outputs,), like)


def norm_of(module: Any, like: Tensor) -> tuple[int, float, int, int]:
    shape = like.shape[-1:]
    cls = type(module)
    if (cls is not nn.LayerNorm and cls is not nn.RMSNorm) or module.normalized_shape != shape:
        raise UnknownModuleError
    parameters, eps = plain(module, cls), module.eps
    if eps is None:  # as torch's RMSNorm
        eps = torch.finfo(torch.float32 if like.dtype.itemsize < 4 else like.dtype).eps
    weight = pointer(parameters, "weight", shape, like)
    if cls is nn.RMSNorm:
        return RMS_NORM, eps, weight, 0
    return LAYER_NORM, eps, weight, pointer(parameters, "bias", shape, like)


def projections_of(mixer: Any, like: Tensor) -> tuple[Any, ...]:
    """Whether values are keys, and the maps to query, key, value and output."""
    flat = mixer.flat_projections()
    if flat is None:
        raise UnknownModuleError
    dim, kv_dim = mixer.dim, mixer.kv_heads * mixer.head_dim
    query, key, value = (
        linear_of(module, outputs, dim, like) if module is not None else IDENTITY
        for module, outputs in zip(flat, (dim, kv_dim, kv_dim), strict=True)
    )
    output = linear_of(mixer.output_proj, dim, dim, like)
    return "value" not in mixer.cache_fields(), *query, *key, *value, *output


def perceptron_of(block: Any, like: Tensor) -> tuple[Any, ...]:
    """The norm, the two maps and the activation of a block's second part, and its hidden width."""
    if type(block.dropout) is not nn.Dropout:
        raise UnknownModuleError  # it may do something in steps, too
    plain(block.mlp, nn.Sequential)
    if len(block.mlp) != 3:
        raise UnknownModuleError
    first, active, second = block.mlp
    dim, hidden = like.shape[-1], first.out_features
    norm = norm_of(block.mlp_norm, like)
    up, down = linear_of(first, hidden, dim, like), linear_of(second, dim, hidden, like)
    cls = type(active)
    if cls not in ACTIVATIONS or getattr(active, "approximate", "none") != "none":
        raise UnknownModuleError
    plain(active, cls)
    return hidden, *norm, *up, *down, ACTIVATIONS[cls]
