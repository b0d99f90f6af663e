"""Which model families work with "graphattn", from the tests' own list: each of them is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integrations"))

import tiny_models as tiny

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.conversion.modules import (
    attention_modules,
    is_cross_attention,
)

KINDS = {
    "decoder": "decoder",
    "encoder": "encoder",
    "vision": "images",
    "encoder-decoder": "encoder and decoder",
}


def same_as_eager(name: str) -> str:
    """Logits and gradients beside eager attention's, padded left and right, in float64."""
    eager, ours = tiny.twins(name)
    for padding in (None, "left", "right"):
        given = tiny.inputs(name, padding=padding)
        with tiny.exact_softmax():
            expected = tiny.gradients(eager, given)
        found = tiny.gradients(ours, given)
        for parameter in expected:
            if tiny.relative_difference(found[parameter], expected[parameter]) > 1e-10:
                return "no"
    return "yes"


def generates(name: str) -> str:
    """The same tokens as eager attention with a dynamic, a static and no cache."""
    if tiny.FAMILIES[name].kind in ("encoder", "vision"):
        return ""
    eager, ours = tiny.twins(name)
    given = tiny.inputs(name, padding="left", length=9)
    given.pop("decoder_input_ids", None)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": tiny.PAD}
    for cache in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        with tiny.exact_softmax():
            texts = [model.generate(**given, **options, **cache) for model in (eager, ours)]
        if not torch.equal(*texts):
            return "no"
    return "yes"


def mixes(name: str, **options: Any) -> str:
    """Whether a call of `configure` takes the family, for its self-attention."""
    model = tiny.twins(name)[1]
    layers = [
        number
        for number, (place, module) in enumerate(attention_modules(model))
        if not is_cross_attention(place, module)
    ]
    try:
        gat.configure(model, layers=layers, **options)
        tiny.logits(model, **tiny.inputs(name))
    except ValueError as refusal:
        for argument in ("softcap", "position_bias"):
            if argument in str(refusal):
                return f"refused: `{argument}`"
        raise
    return "yes"


CHECKS: dict[str, Callable[[str], str]] = {
    "logits, gradients": same_as_eager,
    "caches": generates,
    "window": lambda name: mixes(name, window=4),
    "rbf, krause": lambda name: mixes(name, mixer="krause", window=4, top_k=2),
}


def table() -> str:
    """One row a family, with what was run just now; a family that is not installed says so."""
    import transformers

    installed = set(tiny.families())
    header = ["family", "class", "kind", "in its attention", *CHECKS]
    rows = []
    for name, family in tiny.FAMILIES.items():
        about = [family.title, f"`{family.model}`", KINDS[family.kind], family.note]
        cells = ["not in this version"] + [""] * (len(CHECKS) - 1)
        if name in installed:
            cells = [check(name) for check in CHECKS.values()]
        rows.append([*about, *cells])
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Run with transformers {transformers.__version__}.\n\n{text}\n"
