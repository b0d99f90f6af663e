"""Leaving a model and torch's random numbers as they were found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

RandomState = tuple[Tensor, dict[int, Tensor]]


@contextmanager
def left_as_found(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put parameters, buffers and random numbers back, after an exception too.

    Inside, parameters may be given other data (``parameter.data = ...``): what they held is never
    written, and comes back as the same memory.
    """
    held = [parameter.data for parameter in parameters]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    state = random_state(parameters)
    try:
        yield
    finally:
        for parameter, data in zip(parameters, held, strict=True):
            parameter.data = data
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        set_random_state(state)


def random_state(parameters: Sequence[Tensor]) -> RandomState:
    """torch's random numbers, on the CPU and on the GPUs that hold parameters."""
    gpus = {p.device.index or 0 for p in parameters if p.device.type == "cuda"}
    return torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}


def set_random_state(state: RandomState) -> None:
    """Go back to :func:`random_state`."""
    torch.set_rng_state(state[0])
    for gpu, of_gpu in state[1].items():
        torch.cuda.set_rng_state(of_gpu, gpu)
