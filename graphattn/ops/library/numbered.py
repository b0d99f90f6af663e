"""Objects that operators find by a number, which is a tensor.

An operator takes tensors, numbers and texts. torch.compile compiles again for another number or
text, but not for another value of a tensor. So one compilation serves all objects of a kind.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_OBJECTS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()


def numbered(x: Any) -> Tensor:
    """Return the number of an object, which :func:`object_of` finds as long as it lives."""
    number = next(_NUMBERS)
    _OBJECTS[number] = x
    return torch.tensor(number, device="cpu")  # whatever the default device is


def object_of(number: Tensor) -> Any:
    """Return the object with a number."""
    return _OBJECTS[int(number)]
