"""Say which numbers the gradients of a part are exact for, if log-sums over all parts are given.

A weight is exp(l - L). Both are rounded, and so the weight has a relative error of about |L| times
the precision of the dtype. A softmax of the part itself would not: it subtracts the largest logit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

LEVEL = 1024.0  # log-sums in float32, with which weights have some 4 digits
SOUND = 1e9  # no product of two such numbers and a scale overflows


def are_moderate(numbers: Iterable[Tensor], sums: Iterable[Tensor]) -> bool:
    """Whether all numbers are at most SOUND, all log-sums at most LEVEL, and none of them NaN.

    Log-sums in float64 may be as large as other numbers. On a GPU, the answer waits for the device.
    """
    fit = []
    for x, most in [*((x, SOUND) for x in numbers), *((x, LEVEL) for x in sums)]:
        if x.numel():
            low, high = x.detach().aminmax()
            bound = SOUND if x.dtype == torch.float64 else most
            fit.append((low >= -bound) & (high <= bound))
    return not fit or bool(torch.stack(fit).all())
