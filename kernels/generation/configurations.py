"""The launches of the step kernel that matter most, at their real sizes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from graphattn.kernels.generation.step import window_step
from graphattn.kernels.shared.configuration import SHORT_NAMES, Configuration, made
from graphattn.kernels.shared.launch import Launch, recording


class StepCase(NamedTuple):
    """A token for each of `batch` texts, that have all filled their windows."""

    name: str
    target: str
    window: int
    top_k: int | None = None
    batch: int = 64
    heads: int = 8
    kv_heads: int = 8
    features: int = 64
    dtype: torch.dtype = torch.bfloat16
    rbf: bool = True
    shared: bool = False  # key and value are one tensor, as in Gaussian kernel attention
    valid: bool = False


CASES = (
    StepCase("step, W 256, k 192", "one launch per token", 256, top_k=192),
    StepCase("step, W 256, k 192, one text", "", 256, top_k=192, batch=1),
    StepCase("step, W 256, k 192, padded", "", 256, top_k=192, valid=True),
    StepCase("step, W 256, k 192", "", 256, top_k=192, dtype=torch.float32),
    StepCase("step, W 256, k 192, D 256", "", 256, top_k=192, heads=2, kv_heads=2, features=256),
    StepCase("step, W 256, shared", "one launch per token", 256, shared=True),
    StepCase("step, W 256, shared", "", 256, shared=True, dtype=torch.float32),
    StepCase("step, W 256, dot, 2 key heads", "", 256, kv_heads=2, rbf=False),
    StepCase("step, W 256, D 256", "", 256, heads=2, kv_heads=2, features=256),
    StepCase("step, W 256, D 16", "", 256, heads=32, kv_heads=32, features=16),
    StepCase("step, W 4096, k 192", "", 4096, top_k=192),
    StepCase("step, W 4096, k 192, D 256", "", 4096, top_k=192, heads=2, kv_heads=2, features=256),
    StepCase("step, W 8192, k 192", "", 8192, top_k=192),
    StepCase("step, W 4096, shared", "", 4096, shared=True),
    StepCase("step, W 4096, dot, one text", "", 4096, batch=1, rbf=False),
)


def configurations_of(case: StepCase, device: str = "meta") -> list[Configuration]:
    """The one launch of a case."""
    make = partial(made, dtype=case.dtype, device=device)
    B, W, H, Hk, D = case.batch, case.window, case.heads, case.kv_heads, case.features
    query, key, keys = make(B, H, D), make(B, Hk, D), make(B * Hk, W, D)
    value, values = (key, keys) if case.shared else (make(B, Hk, D), make(B * Hk, W, D))
    with recording() as launches:
        window_step(
            query,
            key,
            value,
            keys,
            values,
            first=1,
            held=W,
            window=W,
            log_sigma=make(H, dtype=torch.float32) if case.rbf else None,
            top_k=case.top_k,
            valid=make(B, dtype=torch.bool) if case.valid else None,
            valids=make(B, W, dtype=torch.bool) if case.valid else None,
        )
    return [_describe(case, launch) for launch in launches]


def _describe(case: StepCase, launch: Launch) -> Configuration:
    B, H, Hk, W = case.batch, case.heads, case.kv_heads, case.window
    row = float(case.features * case.dtype.itemsize)
    tensors = 1 if case.shared else 2
    passes = B * H * -(-W // launch.arguments["SLOTS"])
    return Configuration(
        f"{case.name}, {SHORT_NAMES[case.dtype]}",
        launch,
        # The cache once, the new rows in and into the cache, the query and the output.
        bytes=tensors * B * Hk * (W + 2) * row + 2 * B * H * row,
        iterations=passes * (1 if case.top_k is None else 2),  # over keys, and over values
        target=case.target,
        gathered=tensors * B * H * W * row,
    )
