"""Objectives by the names that the command line and the files of runs use."""

from __future__ import annotations

import inspect
from typing import Any

from graphattn.graphs.arguments import as_choice
from graphattn.near_names import did_you_mean
from graphattn.train.diffusion.objective import AbsorbingDiffusion
from graphattn.train.objectives.causal import NextToken
from graphattn.train.objectives.classification import Classification
from graphattn.train.objectives.masked import MaskedTokens
from graphattn.train.objectives.objective import Objective
from graphattn.train.objectives.regression import ResidueRegression

_CLASSES = (MaskedTokens, NextToken, Classification, ResidueRegression, AbsorbingDiffusion)
OBJECTIVES: dict[str, Any] = {made.name: made for made in _CLASSES}


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
    as_choice("objective", name, tuple(OBJECTIVES))
    known = inspect.signature(OBJECTIVES[name]).parameters
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known) or f": it has {', '.join(known)}"
            raise ValueError(f"objective {name!r} has no option {option!r}{hint}")
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"objective {name!r} needs the option {option!r}")
    return OBJECTIVES[name](**options)
