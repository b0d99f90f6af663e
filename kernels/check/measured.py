"""Measured times of launches, to be shown beside their predictions.

A file of them is JSON: an object with the facts of `FACTS` as texts, and "launches", a list of
[name, seconds]. Names are those of configurations. Several launches may have one name; they are in
the order in which they run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FACTS = ("hardware", "driver", "torch", "triton", "date", "commit")


class Measured(NamedTuple):
    """Times of launches on a device.

    >>> facts = dict.fromkeys(FACTS, "x") | {"hardware": "NVIDIA H200", "commit": "abc"}
    >>> measured = Measured(facts, [("dots", 1e-6), ("forward", 2e-6), ("dots", 3e-6)])
    >>> list(measured.seconds_of(["dots", "dots", "dots", "forward"]))
    [1e-06, 3e-06, None, 2e-06]
    """

    facts: Mapping[str, str]
    launches: Sequence[tuple[str, float]]

    def seconds_of(self, names: Iterable[str]) -> Iterator[float | None]:
        """Yield the time of every launch, None where it was not measured.

        The first launch of a name has its first time, the second the second, and so on.
        """
        times: dict[str, list[float]] = defaultdict(list)
        for name, seconds in reversed(self.launches):
            times[name].append(seconds)
        for name in names:
            yield times[name].pop() if times[name] else None

    @property
    def provenance(self) -> str:
        """A sentence on where the times are from."""
        facts = self.facts
        return (
            f"Measured on {facts['hardware']} (driver {facts['driver']}, torch {facts['torch']}, "
            f"Triton {facts['triton']}) on {facts['date']}, commit {facts['commit']}; the kernels "
            "and their sizes of tiles may have changed since."
        )


def as_file(facts: Mapping[str, Any], launches: Iterable[tuple[str, float]]) -> str:
    """JSON text of times and of the facts that belong to them; other facts are left out."""
    known = {name: str(facts.get(name, "unknown")) for name in FACTS}
    lines = ",\n".join(f"  {json.dumps([name, seconds])}" for name, seconds in launches)
    head = json.dumps(known, indent=1).removesuffix("\n}")
    return f'{head},\n "launches": [\n{lines}\n ]\n}}\n'


def read_measured(path: Path) -> Measured:
    """Read a file of measured times.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        launches = [(str(name), float(seconds)) for name, seconds in content["launches"]]
        return Measured({name: str(content[name]) for name in FACTS}, launches)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"measured must be a JSON object with {', '.join(FACTS)} and launches, a list of "
            f"[name, seconds], got {path}: {type(error).__name__}: {error}"
        ) from error
