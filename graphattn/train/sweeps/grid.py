"""Grid of a sweep: every combination of mixer, options, learning rate and seed is a trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any
from urllib.parse import quote

from graphattn.graphs.arguments import as_choice
from graphattn.models.mixers import HALVES, KINDS, NAMES
from graphattn.near_names import did_you_mean
from graphattn.train.runs.config import FREE, RunConfig

DIGITS = 4  # digits of the values of a range, so that names of trials are short
GRID = "the values of an option (window=1,2,4)"
# Options that trials of a grid may differ in: their losses are compared, so their data is the same.
AXES = tuple(
    each.name
    for each in fields(RunConfig)
    if each.name not in (*FREE, *("mixer", "lr", "seed", "mixer_options"))
    and each.name not in ("data", "kind", "tokenizer", "validation", "test")
)
FORMS = "numbers (1e-4,3e-4), or a range with its number of values (1e-4..5e-2:7)"


@dataclass(frozen=True, order=True)
class Trial:
    """One training of a sweep; `options` are those of the grid that its mixer takes."""

    mixer: str
    lr: float
    seed: int
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the trial, which is also that of its folder in ``trials``."""
        options = (f",{name}={quote(str(value), safe=' ')}" for name, value in self.options)
        return f"mixer={self.mixer},lr={self.lr!r},seed={self.seed}{''.join(options)}"

    def config(self, shared: RunConfig, out: str) -> RunConfig:
        """Return the config of its run, with those `mixer_options` that its mixer takes."""
        taken, given = _options_of(self.mixer), dict(self.options)
        changes = {name: given.pop(name) for name in AXES if name in given}
        options = {**shared.mixer_options, **given}
        options = {name: value for name, value in options.items() if name in taken}
        return shared.replace(
            mixer=self.mixer, lr=self.lr, seed=self.seed, mixer_options=options, out=out, **changes
        )


def trials_of(
    mixers: Iterable[str], lrs: Iterable[float], seeds: int, grid: Mapping[str, Sequence[Any]]
) -> list[Trial]:
    """List all combinations, seed by seed, so that every combination has a result early.

    If a mixer does not take an option of the grid, it has one trial for all values.
    """
    combinations = [tuple(zip(grid, values, strict=True)) for values in product(*grid.values())]
    trials = (
        Trial(mixer, lr, seed, tuple(each for each in options if _takes(mixer, each[0])))
        for seed in range(seeds)
        for options in combinations
        for lr in lrs
        for mixer in mixers
    )
    return list({trial.name: trial for trial in trials}.values())


def as_grid(grid: Any, mixers: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of every option of a grid, each once.

    It is given as a dict, or as texts ``window=1,2,4``; a text may contain several of them.
    """
    if not isinstance(grid, Mapping):
        texts = [grid] if isinstance(grid, str) else list(grid or ())
        parts = [part.partition("=") for text in texts for part in text.split()]
        if wrong := [name for name, equals, values in parts if not (name and equals and values)]:
            raise ValueError(f"grid must be {GRID}, got {wrong[0]!r}")
        grid = {name: _values(name, values) for name, _, values in parts}
        if len(grid) < len(parts):
            raise ValueError("grid must contain every option once, got one of them twice")
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"grid: the values of {name} must be a list, got {values!r}")
        if not any(_takes(mixer, name) for mixer in mixers):
            known = [*AXES, *(option for mixer in mixers for option in _options_of(mixer))]
            raise ValueError(
                f"grid must contain options of models and training, or of {', '.join(mixers)}, got "
                f"{name!r}{did_you_mean(name, known)}"
            )
    found = {
        name: list({str(each): each for each in values}.values()) for name, values in grid.items()
    }
    if empty := [name for name, values in found.items() if not values]:
        raise ValueError(
            f"grid must have at least one value of every option, got none of {empty[0]}"
        )
    return found


def _values(name: str, text: str) -> list[Any]:
    """Values separated by commas, each as on the command line or in a YAML file."""
    texts = text.split(",")
    if name in AXES:
        return [RunConfig.parse(name, each) for each in texts]
    return [RunConfig.parse("mixer_options", f"{{value: {each}}}")["value"] for each in texts]


def _takes(mixer: str, option: str) -> bool:
    return option in AXES or option in _options_of(mixer)


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
