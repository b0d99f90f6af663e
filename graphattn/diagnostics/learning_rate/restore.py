"""Restoring a model and torch's random number generators after a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

RandomState = tuple[Tensor, dict[int, Tensor]]


@contextmanager
def left_as_found(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restore parameters, buffers and random number generators, also after an exception.

    Inside the context, parameters may be given other data (``parameter.data = ...``). The original
    tensors are then not written to, and the same memory is restored.
    """
    original = [parameter.data for parameter in parameters]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    state = random_state(parameters)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, original, strict=True):
            parameter.data = data
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        set_random_state(state)


def random_state(parameters: Sequence[Tensor]) -> RandomState:
    """State of torch's random number generators, on the CPU and on the parameters' GPUs."""
    gpus = {p.device.index or 0 for p in parameters if p.device.type == "cuda"}
    return torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}


def set_random_state(state: RandomState) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    for gpu, of_gpu in state[1].items():
        torch.cuda.set_rng_state(of_gpu, gpu)
