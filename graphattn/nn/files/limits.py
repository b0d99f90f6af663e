"""Stop constructors that make far more parameters than a file contains."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

# A constructor may make some parameters that it replaces later.
SLACK = 16


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise a ValueError inside if far more parameters are made than there are weights.

    A config is a small text. A wrong number in it must not take all memory, or run without end.
    """
    numbers = sum(tensor.numel() for tensor in weights.values())
    most = {"tensors": SLACK * len(weights) + 1000, "numbers": SLACK * numbers + 2**20}
    left, own = dict(most), threading.get_ident()

    def count(module: Any, name: str, parameter: Any) -> None:
        if parameter is None or threading.get_ident() != own:  # hooks are for all threads
            return
        left["tensors"] -= 1
        left["numbers"] -= parameter.numel()
        if min(left.values()) < 0:
            raise ValueError(
                f"its class makes more parameters than the file of weights has: that has {numbers} "
                f"numbers in {len(weights)} tensors"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_depths(config: Any, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a config has more blocks than there are weights.

    Constructors make lists of options, one per block, before they make parameters.
    """
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    for name, value in entries:
        if name in ("depth", "depths"):
            depths = value if isinstance(value, list) else [value]
            for depth in depths:
                if isinstance(depth, int) and depth > len(weights):
                    raise ValueError(
                        f"{name} must be at most {len(weights)}, the number of tensors in the file "
                        f"of weights, got {value!r:.40}"
                    )
        elif isinstance(value, dict | list):
            check_depths(value, weights)
