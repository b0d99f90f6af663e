"""Certificates and their facts: how they are shown, and the worst of several."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import Any, Literal

Status = Literal["holds", "violated", "not applicable", "measured"]

SLACK = 1e-7  # relative tolerance for equalities that hold in exact arithmetic
SHOWN = 16  # the most parts that are printed
WIDTHS = 18, 14, 38, 40  # widths of a table's columns in characters


@dataclass(frozen=True)
class Fact:
    """One statement about a graph or a layer, with its status and numbers.

    Attributes:
        name: a short name, by which a certificate finds the fact.
        status: "holds", "violated", "not applicable" or "measured".
        statement: what the fact says, or why it does not apply.
        numbers: measured and predicted numbers by name.
        source: the paper and the equation, if there is one.

    Example:
        >>> import graphattn as ga
        >>> fact = ga.spectral.certify(ga.complete_graph(5))["step"]
        >>> fact.status, round(fact.numbers["lambda_max"], 9)
        ('holds', 5.0)
    """

    name: str
    status: Status
    statement: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    source: str = ""  # paper and equation


PAPER = "Stabilizing Transformer Training Through Consensus"


def energy_falls(before: float, after: float, where: str) -> Fact:
    """State that a step does not raise the energy."""
    status: Status = "holds" if after <= before * (1 + SLACK) else "violated"
    numbers = {"before": before, "after": after}
    return Fact("energy falls", status, where, numbers, f"{PAPER}, Eq. 5-7, with R")


def constants_stay(drift: float, statement: str) -> Fact:
    """State that a step does not change equal tokens; `drift` is the largest relative change."""
    status: Status = "holds" if drift <= SLACK else "violated"
    numbers = {"largest relative change": drift}
    return Fact("constants stay", status, statement, numbers, f"{PAPER}, Appendix A")


@dataclass(frozen=True, repr=False)
class Certificate:
    """Facts about a graph, a layer or a model, from :func:`certify`.

    It is shown as a table at the prompt and in a notebook, and as a list by ``print``. A fact
    "holds" or is "violated" if a theorem applies and can be checked. It is "not applicable" if the
    conditions of the theorem are not met, and says which. It is "measured" if there is no theorem.

    The certificate of a batch or of a model has `parts`, a certificate for every sequence or layer.
    Its own facts are then the worst of those in `parts`, and say in which part they are.

    Attributes:
        subject: the graph, layer or model, as text.
        facts: the facts, which ``certificate[name]`` finds by name.
        parts: certificates by the name of a layer or sequence; empty for a single one.

    Example:
        >>> import graphattn as ga
        >>> certificate = ga.spectral.certify(ga.causal_graph(6))
        >>> certificate.sound, [fact.name for fact in certificate.facts][:3]
        (True, ['connected', 'Fiedler value', 'step'])
        >>> certificate["energy updates"].status
        'not applicable'
    """

    subject: str
    facts: tuple[Fact, ...]
    parts: Mapping[str, Certificate] = field(default_factory=dict)

    @property
    def num_facts(self) -> int:
        """The number of theorems that were considered, over all parts; measured facts are none."""
        return sum(fact.status != "measured" for fact in self._all_facts())

    @property
    def num_checked(self) -> int:
        """The number of these theorems that apply, and so were checked."""
        return sum(fact.status in ("holds", "violated") for fact in self._all_facts())

    @property
    def sound(self) -> bool | None:
        """Whether no theorem is violated; None if none applies, so that nothing was certified."""
        if self.num_checked == 0:
            return None
        return all(fact.status != "violated" for fact in self.facts)

    def _all_facts(self) -> Iterator[Fact]:
        leaves = dict(_leaves(self.parts)).values() if self.parts else (self,)
        return (fact for leaf in leaves for fact in leaf.facts)

    def _verdict(self) -> str:
        violated = sum(fact.status == "violated" for fact in self._all_facts())
        verdict = "nothing is certified" if self.sound is None else f"{violated} violated"
        return f"{self.num_checked} of {self.num_facts} theorems apply, {verdict}"

    def __getitem__(self, name: str) -> Fact:
        for fact in self.facts:
            if fact.name == name:
                return fact
        raise KeyError(
            f"there is no fact {name!r} in this certificate, whose facts are "
            f"{[fact.name for fact in self.facts]}"
        )

    def __str__(self) -> str:
        lines = [self.subject, *_listing(self), f"  {self._verdict()}"]
        for name, part in list(self.parts.items())[:SHOWN]:
            lines += [f"{name}: {part.subject}", *_listing(part)]
        return "\n".join([*lines, *_left_out(self.parts)])

    def __repr__(self) -> str:
        rows = [("fact", "status", "numbers", "what it says")]
        rows += [
            (fact.name, fact.status, "\n".join(_number_lines(fact)), fact.statement)
            for fact in self.facts
        ]
        rule = "  ".join("-" * width for width in WIDTHS)
        lines = [self.subject, *_row(rows[0]), rule]
        for row in rows[1:]:
            lines += _row(row)
        lines += [rule, self._verdict()]
        if self.parts:
            lines += [
                f"the worst of {len(self.parts)} certificates, which are in .parts: "
                f"{_some(self.parts)}"
            ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML with a table, for notebooks."""
        rows = [_html_rows(self, "")]
        rows += [_html_rows(part, name) for name, part in list(self.parts.items())[:SHOWN]]
        rows += [f'<tr><td colspan="4">{escape(line)}</td></tr>' for line in _left_out(self.parts)]
        head = "".join(
            f'<th style="text-align: left">{title}</th>'
            for title in ("fact", "status", "numbers", "what it says")
        )
        return (
            f"<table><caption>{escape(self.subject)}<br>{escape(self._verdict())}</caption>"
            f"<thead><tr>{head}</tr></thead>{''.join(rows)}</table>"
        )

    def to_json(self) -> str:
        """Convert all facts to JSON; infinity and NaN, which JSON does not have, become strings."""
        return json.dumps(_as_dict(self), indent=2)


# The number by which one fact is worse than another of the same name and status. The numbers of
# other facts (such as norms and counts) cannot be better or worse: the largest of each is reported.
WORSE: Mapping[str, Callable[[Mapping[str, float]], float]] = {
    "low-pass filter": lambda numbers: -numbers["1 - 2 eta lambda_max"],
    "no overshoot": lambda numbers: -numbers["1 - eta lambda_max"],
    "energy falls": lambda numbers: numbers["after"] / max(numbers["before"], 1e-300),
    "constants stay": lambda numbers: numbers["largest relative change"],
    "mean stays": lambda numbers: numbers["drift"],
    "rate": lambda numbers: numbers["slowest mode"],
    "rows are averages": lambda numbers: numbers["largest |row sum - 1|"],
}
ORDER: Mapping[Status, int] = {"violated": 3, "holds": 2, "measured": 1, "not applicable": 0}


def worst_of(subject: str, parts: Mapping[str, Certificate]) -> Certificate:
    """Make the certificate of several layers or sequences, with the worst of every fact.

    A fact is violated if it is violated in any part. It holds if it holds in all parts to which the
    theorem applies.
    """
    leaves = dict(_leaves(parts))
    names = dict.fromkeys(fact.name for leaf in leaves.values() for fact in leaf.facts)
    return Certificate(subject, tuple(_worst_fact(name, leaves) for name in names), dict(parts))


def _leaves(parts: Mapping[str, Certificate]) -> Iterator[tuple[str, Certificate]]:
    """Yield all certificates without parts of their own, with their paths."""
    for name, part in parts.items():
        if part.parts:
            yield from ((f"{name}, {inner}", leaf) for inner, leaf in _leaves(part.parts))
        else:
            yield name, part


def _worst_fact(name: str, leaves: Mapping[str, Certificate]) -> Fact:
    by_place = {
        where: fact for where, leaf in leaves.items() for fact in leaf.facts if fact.name == name
    }
    where = max(by_place, key=lambda place: _badness(by_place[place]))
    worst = by_place[where]
    alike = [fact for fact in by_place.values() if fact.status == worst.status]
    total = len(by_place)
    count = f"all {total}" if len(alike) == total else f"{len(alike)} of {total}"
    numbers, place = worst.numbers, ""
    if name in WORSE:
        place = f", worst in {where}" if numbers else ""
    elif numbers:
        keys = dict.fromkeys(key for fact in alike for key in fact.numbers)
        numbers = {key: max(f.numbers.get(key, -math.inf) for f in alike) for key in keys}
        place = ", the largest of each"
    statement = f"{worst.statement} ({worst.status} in {count}{place})"
    return Fact(name, worst.status, statement, numbers, worst.source)


def _badness(fact: Fact) -> tuple[int, float]:
    worse = WORSE.get(fact.name)
    size = worse(fact.numbers) if worse is not None and fact.numbers else -math.inf
    return ORDER[fact.status], size


def _number_lines(fact: Fact) -> list[str]:
    return [f"{name} {value:.6g}" for name, value in fact.numbers.items()]


def _listing(certificate: Certificate) -> list[str]:
    lines = []
    for fact in certificate.facts:
        lines.append(f"  [{fact.status}] {fact.name}: {fact.statement}")
        numbers = ", ".join(_number_lines(fact))
        lines += [f"      {text}" for text in (numbers, fact.source) if text]
    return lines


def _left_out(parts: Mapping[str, Any]) -> list[str]:
    more = len(parts) - SHOWN
    return [f"... and {more} more in .parts"] if more > 0 else []


def _row(cells: tuple[str, str, str, str]) -> list[str]:
    """Format one row as lines, with every cell wrapped to the width of its column."""
    columns = [
        [line for text in cell.split("\n") for line in wrap(text, width)]
        for cell, width in zip(cells, WIDTHS, strict=True)
    ]
    height = max(map(len, columns))
    filled = [column + [""] * (height - len(column)) for column in columns]
    return [
        "  ".join(line.ljust(width) for line, width in zip(lines, WIDTHS, strict=True)).rstrip()
        for lines in zip(*filled, strict=True)
    ]


def _some(parts: Mapping[str, Any]) -> str:
    names = list(parts)
    return ", ".join(names if len(names) < 6 else [*names[:4], "...", names[-1]])


def _html_rows(certificate: Certificate, name: str) -> str:
    rows = []
    if name:
        title = f"{name}: {certificate.subject}"
        rows.append(f'<tr><th colspan="4" style="text-align: left">{escape(title)}</th></tr>')
    for fact in certificate.facts:
        says = escape(fact.statement)
        if fact.source:
            says += f"<br><small>{escape(fact.source)}</small>"
        numbers = "<br>".join(map(escape, _number_lines(fact)))
        status = escape(fact.status)
        if fact.status == "violated":
            status = f"<strong>{status}</strong>"
        cells = (escape(fact.name), status, numbers, says)
        rows.append(
            "<tr>"
            + "".join(f'<td style="text-align: left; vertical-align: top">{c}</td>' for c in cells)
            + "</tr>"
        )
    return f"<tbody>{''.join(rows)}</tbody>"


def _as_dict(certificate: Certificate) -> dict[str, Any]:
    def number(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)

    facts = [
        {
            "name": fact.name,
            "status": fact.status,
            "statement": fact.statement,
            "numbers": {name: number(value) for name, value in fact.numbers.items()},
            "source": fact.source,
        }
        for fact in certificate.facts
    ]
    entries: dict[str, Any] = {
        "subject": certificate.subject,
        "sound": certificate.sound,
        "num_checked": certificate.num_checked,
        "num_facts": certificate.num_facts,
        "facts": facts,
    }
    if certificate.parts:
        entries["parts"] = {name: _as_dict(part) for name, part in certificate.parts.items()}
    return entries
