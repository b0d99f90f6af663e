"""Grid of a sweep: every combination of mixer, learning rate and seed is a trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphattn.graphs.arguments import as_choice
from graphattn.models.mixers import HALVES, KINDS, NAMES
from graphattn.near_names import did_you_mean
from graphattn.train.runs.config import RunConfig

DIGITS = 4  # digits of the values of a range, so that names of trials are short
FORMS = "numbers (1e-4,3e-4), or a range with its number of values (1e-4..5e-2:7)"


@dataclass(frozen=True, order=True)
class Trial:
    """One training of a sweep."""

    mixer: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the trial, which is also that of its folder in ``trials``."""
        return f"mixer={self.mixer},lr={self.lr!r},seed={self.seed}"

    def config(self, shared: RunConfig, out: str) -> RunConfig:
        """Return the config of its run, with those `mixer_options` that its mixer takes."""
        taken = _options_of(self.mixer)
        options = {name: value for name, value in shared.mixer_options.items() if name in taken}
        return shared.replace(
            mixer=self.mixer, lr=self.lr, seed=self.seed, mixer_options=options, out=out
        )


def trials_of(mixers: Iterable[str], lrs: Iterable[float], seeds: int) -> list[Trial]:
    """List all combinations, seed by seed, so that every combination has a result early."""
    return [Trial(mixer, lr, seed) for seed in range(seeds) for lr in lrs for mixer in mixers]


def as_mixers(mixers: str | Sequence[str], options: dict[str, Any]) -> list[str]:
    """Return the names of mixers, each once; each of the `options` must be one of at least one."""
    names = [each.strip() for each in mixers.split(",")] if isinstance(mixers, str) else [*mixers]
    if not names:
        raise ValueError("mixers must name at least one mixer, got none")
    for name in names:
        as_choice("mixers", name, NAMES)
    for option in options:
        if not any(option in _options_of(name) for name in names):
            raise ValueError(
                f"mixer_options must contain options of {', '.join(names)}, got {option!r}"
                + did_you_mean(option, [each for name in names for each in _options_of(name)])
            )
    return list(dict.fromkeys(names))


def as_rates(lrs: str | float | Sequence[float]) -> list[float]:
    """Return learning rates in ascending order, each once.

    They are numbers, or text: ``1e-4,3e-4``, or ``1e-4..5e-2:7`` for 7 values from 1e-4 to 5e-2,
    including both ends, each the same multiple of the one before (rounded to 4 digits).
    """
    if isinstance(lrs, str):
        rates = [rate for part in lrs.split(",") for rate in _rates(part.strip())]
    elif isinstance(lrs, Iterable):
        rates = [_rate(entry, entry) for entry in lrs]
    else:
        rates = [_rate(lrs, lrs)]
    if not rates:
        raise ValueError("lrs must contain at least one learning rate, got none")
    for rate in rates:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"lrs must be finite numbers above 0, got {rate!r}")
    return sorted(set(rates))


def _options_of(mixer: str) -> set[str]:
    return {option for name in HALVES.get(mixer, (mixer,)) for option in KINDS[name].options}


def _rate(text: Any, whole: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"lrs must be {FORMS}, got {whole!r}") from None


def _rates(part: str) -> list[float]:
    """Return the values of a number, or of ``first..last:count``."""
    if ".." not in part:
        return [_rate(part, part)]
    ends, colon, number = part.partition(":")
    first, last = (_rate(end, part) for end in ends.split("..", 1))
    if not colon or not number.strip().isdecimal():
        raise ValueError(
            f"lrs: a range must contain its number of values, got {part!r}: lrs must be {FORMS}"
        )
    count = int(number)
    if not (0 < first < last < math.inf):
        raise ValueError(
            f"lrs: a range must go from a number above 0 to a larger one, got {part!r}"
        )
    if count < 2:
        raise ValueError(
            f"lrs: a range must have at least 2 values, which are its ends, got {part!r}"
        )
    rates: list[float] = []
    # A larger count is more than there are numbers with this number of digits.
    if count <= 9 * 10 ** (DIGITS - 1) * (math.log10(last / first) + 1) + 2:
        ratio = math.log(last / first) / (count - 1)
        inner = [float(f"{first * math.exp(ratio * k):.{DIGITS}g}") for k in range(1, count - 1)]
        rates = [first, *inner, last]
    if not rates or any(high <= low for low, high in itertools.pairwise(rates)):
        raise ValueError(
            f"lrs: the values of a range must differ when rounded to {DIGITS} digits, got "
            f"{part!r}: use fewer values"
        )
    return rates
