"""Objectives by the names that the command line and the files of runs use."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from graphattn.graphs.arguments import as_choice
from graphattn.near_names import did_you_mean
from graphattn.train.objectives.objective import Objective

_OBJECTIVES = {  # name: module and class in graphattn.train
    "masked": ("objectives.masked", "MaskedTokens"),
    "causal": ("objectives.causal", "NextToken"),
    "classification": ("objectives.classification", "Classification"),
    "regression": ("objectives.regression", "ResidueRegression"),
    "diffusion": ("diffusion", "AbsorbingDiffusion"),
}


def objective(name: str, **options: Any) -> Objective:
    """Make an objective: "masked", "causal", "classification", "regression" or "diffusion".

    Args:
        name: the name, as in ``graphattn train --objective``.
        options: arguments of its class, such as `mask_token` of "masked".

    Raises:
        ValueError: if the name is unknown, if the objective does not have an option, or if a
            required option is missing.

    Example:
        >>> import graphattn as ga
        >>> ga.train.objective("masked", mask_token=21, schedule="betalinear30")
        MaskedTokens(mask_token=21, schedule='betalinear30')
        >>> ga.train.objective("masked", mask_token=21, mask_rate=0.3)
        Traceback (most recent call last):
            ...
        ValueError: objective 'masked' has no option 'mask_rate': did you mean 'mask_ratio'?
    """
    as_choice("objective", name, tuple(_OBJECTIVES))
    module, kind = _OBJECTIVES[name]
    made: Any = getattr(importlib.import_module(f"graphattn.train.{module}"), kind)
    known = inspect.signature(made).parameters
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known) or f": it has {', '.join(known)}"
            raise ValueError(f"objective {name!r} has no option {option!r}{hint}")
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"objective {name!r} needs the option {option!r}")
    found: Objective = made(**options)
    return found
