"""Show the changes to a model, layer by layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphattn.integrations.transformers.conversion.modules import attention_modules
from graphattn.integrations.transformers.options import AS_IT_IS, steps_of
from graphattn.integrations.transformers.wrapped import unwrapped


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
    modules = attention_modules(inside)
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (name, module) in enumerate(modules):
        options = getattr(module, "graphattn_options", AS_IT_IS)
        done = []
        if options != AS_IT_IS:
            done.append({"call": "configure", **_given(vars(options))})
        for step in steps_of(inside.config):
            layers = step.get("layers")
            if step["call"] != "configure" and (layers is None or number in layers):
                done.append(_given({key: step[key] for key in step if key != "layers"}))
        if done:
            found[name] = done
    return found


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
