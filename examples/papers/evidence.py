"""An experiment about a claim of a paper: its prediction, its record, and its page.

Every other file of this folder is one experiment. Its prediction, and what would refute it, is
written down before anything is measured:

    python examples/papers/NAME.py --plan              # the record, without numbers: commit it
    python examples/papers/NAME.py --data FOLDER       # measure; run it again to continue
    make results NAME=NAME DATA=FOLDER                 # the same, in the project's environment

The record is docs/results/NAME.json, with a page and a figure beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from graphattn.bench.reporting.record import provenance

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
Verdict = Literal["open", "held", "not held", "inconclusive", "beyond"]


@dataclass(frozen=True)
class Experiment:
    """A claim, what we expect, and what would refute it.

    Attributes:
        name: name of the script and of the record.
        title: heading of the page.
        paper: where the claim stands.
        claim: what the paper says.
        prediction: what is measured, and which numbers would confirm the claim.
        refuted_if: which numbers would refute it.
        config: everything that determines the numbers.
        notes: what differs from the paper, and what the numbers cannot say.
    """

    name: str
    title: str
    paper: str
    claim: str
    prediction: str
    refuted_if: str
    config: dict[str, Any]
    notes: str = ""


@dataclass
class Findings:
    """Results of an experiment.

    Attributes:
        numbers: rows with mechanism, setting, mean, spread and seeds.
        verdict: whether the claim held.
        why: the numbers that decide, in a sentence.
        runs: every run, those that diverged, too.
        seeds: the seeds.
        cpu_hours: seconds of all runs, of one thread each, divided by 3,600. Training runs have
            seconds of a clock, so this is the most that they can have computed.
        draw: draws the figure into axes.
        columns: what mean and spread are.
    """

    numbers: list[dict[str, Any]]
    verdict: Verdict
    why: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    cpu_hours: float = 0.0
    draw: Callable[[Any], Any] | None = None
    columns: tuple[str, str] = ("mean", "spread")


Measure = Callable[[argparse.Namespace], Findings]


def main(experiment: Experiment, measure: Measure, given: Sequence[str] | None = None) -> None:
    """Write the plan of an experiment, or measure and write what came out."""
    parser = argparse.ArgumentParser(description=experiment.title)
    parser.add_argument("--plan", action="store_true", help="write the record without numbers")
    parser.add_argument("--data", default="data", help="folder that contains the data")
    parser.add_argument("--work", default=f"runs/{experiment.name}", help="folder of the runs")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--partial", action="store_true", help="report the runs that are there")
    parser.add_argument("--page", action="store_true", help="write title and notes of the script")
    parser.add_argument("--results", default=os.fspath(RESULTS), help="folder of the record")
    arguments = parser.parse_args(given)
    folder = Path(arguments.results)
    folder.mkdir(parents=True, exist_ok=True)
    planned = folder / f"{experiment.name}.json"
    record = json.loads(planned.read_text(encoding="utf-8")) if planned.is_file() else None
    if arguments.plan:
        if record is not None and record["numbers"]:
            raise SystemExit(f"{planned} contains numbers, which a plan would erase")
        write(experiment, Findings([], "open", "not measured yet"), folder)
        return
    if record is None:
        raise SystemExit(f"{planned} is missing: write and commit the prediction first (--plan)")
    check_plan(experiment, record)
    if arguments.page:
        save({**record, "title": experiment.title, "notes": experiment.notes}, folder)
        return
    write(experiment, measure(arguments), folder)


def once(
    arguments: argparse.Namespace, path: Path, run: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the results of a run: from their file if it has ended, else run it.

    With --partial, a run that has not ended is left out (None).
    """
    if path.is_file():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known
    if arguments.partial:
        return None
    found = run()
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".begun")
    begun.write_text(json.dumps(found), encoding="utf-8")
    begun.replace(path)  # so that a file which is there is whole
    return found


def check_plan(experiment: Experiment, record: dict[str, Any]) -> None:
    """Raise an error if the prediction is not the one that was written down before."""
    for name in ("claim", "prediction", "refuted_if"):
        if record[name] != getattr(experiment, name):
            raise SystemExit(
                f"{name} of {experiment.name} differs from its record, which was written before "
                "the measurement: restore it, or make another experiment"
            )


def kept_result(
    arguments: argparse.Namespace,
    name: str,
    config: dict[str, Any],
    work: Callable[[], dict[str, Any]],
) -> dict[str, Any] | None:
    """Return the numbers of one run by :func:`once`, from NAME.json in the folder of the runs.

    The file also has the config of the run; another config is an error. "seconds" of the result is
    the CPU time.
    """
    path = Path(arguments.work) / f"{name}.json"
    config = json.loads(json.dumps(config))

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        start = time.process_time()
        result = work()
        seconds = round(time.process_time() - start, 2)
        print(f"{name}: {seconds} s", flush=True)
        return {"config": config, "result": {**result, "seconds": seconds}}

    found = once(arguments, path, run)
    if found is None:
        return None
    if found["config"] != config:
        raise SystemExit(f"{path} has another config: give another folder with --work")
    result: dict[str, Any] = found["result"]
    return result


def write(experiment: Experiment, found: Findings, folder: Path) -> None:
    """Write NAME.json, NAME.md and, if there are numbers, NAME.svg, and the page of all."""
    facts = provenance(torch.device("cpu"), "")
    record = {
        **asdict(experiment),
        "seeds": found.seeds,
        "numbers": found.numbers,
        "columns": found.columns,
        "verdict": found.verdict,
        "why": found.why,
        "cpu_hours": round(found.cpu_hours, 2),
        "machine": facts["hardware"].rsplit(",", 1)[0],
        "torch": facts["torch"],
        "commit": facts["commit"],
        "runs": found.runs,
    }
    if found.draw is not None:
        draw(found.draw, folder / f"{experiment.name}.svg")
    save(record, folder)


def save(record: dict[str, Any], folder: Path) -> None:
    """Write a record, its page, and the page of all records."""
    name = record["name"]
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    has_figure = (folder / f"{name}.svg").is_file()
    (folder / f"{name}.md").write_text(page(record, has_figure), encoding="utf-8")
    (folder / "index.md").write_text(index(folder), encoding="utf-8")
    print(f"{name}: {record['verdict']}. {record['why']}")


def index(folder: Path) -> str:
    """Return the page that lists all records of a folder."""
    records = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    ]
    hours = sum(record["cpu_hours"] for record in records)
    rows = []
    for record in records:
        name, verdict = record["name"], record["verdict"]
        if verdict == "open":
            verdict = "begun" if record["numbers"] else "planned"
        figure = f'<img src="{name}.svg" alt="its figure" height="40">'
        drawn = (folder / f"{name}.svg").is_file()
        rows.append(f"| [{record['title']}]({name}.md) | {verdict} | {figure if drawn else ''} |")
    names = "\n".join(record["name"] for record in records)
    return INDEX.format(rows="\n".join(rows), hours=f"{hours:.1f}", names=names)


INDEX = """\
# Do the papers hold?

`graphattn verify` checks the theorems of the papers. This page is about their empirical claims, at
the scale of a laptop. Each experiment has a prediction, and says what would refute it; both are in
the history of the project before the first number. A claim that does not hold at this scale may
hold at that of the paper. [What these experiments say you should use](what-to-use.md) has the
conclusions.

| experiment | result | figure |
|---|---|---|
{rows}

All runs together took at most {hours} hours of one core. `make results NAME=... DATA=FOLDER`
repeats one of them; the folder contains the files that its page names. `examples/papers/` has a
script for each.

```{{toctree}}
:hidden:

what-to-use
{names}
```
"""


def draw(figure_of: Callable[[Any], Any], path: Path) -> None:
    """Draw a figure whose file depends on nothing but the numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure = Figure(figsize=(7.0, 4.5), layout="constrained")
        figure_of(figure.subplots())
        figure.savefig(path, metadata={"Date": None})


def page(record: dict[str, Any], has_figure: bool) -> str:
    """Return the page of a record, in Markdown."""
    name = record["name"]
    lines = [f"# {record['title']}", ""]
    lines += [f"Source: {record['paper']}.", ""]
    for heading, key in (
        ("Claim", "claim"),
        ("Prediction, written before the measurement", "prediction"),
        ("It would be refuted by", "refuted_if"),
    ):
        lines += [f"**{heading}.** {record[key]}", ""]
    if record["verdict"] == "open" and not record["numbers"]:
        lines += ["**Result.** Not measured yet.", ""]
    else:
        lines += [f"**Result: {record['verdict']}.** {record['why']}", ""]
    if has_figure:
        lines += [f"![{record['title']}]({name}.svg)", ""]
    if record["numbers"]:
        lines += [*table(record["numbers"], record["columns"]), ""]
    if record["notes"]:
        lines += ["## What is different from the paper", "", record["notes"], ""]
    lines += ["## Repeat it", "", "```", f"make results NAME={name} DATA=FOLDER", "```", ""]
    files = record["config"].get("files", {})
    if files:
        given = "; ".join(f"`{file}` ({about})" for file, about in files.items())
        lines += [f"The folder contains {given}.", ""]
    if record["numbers"]:
        lines += [
            f"{len(record['runs'])} runs, at most {record['cpu_hours']:g} hours of one core "
            f"({record['machine']}). Every run is in `{name}.json`.",
            "",
        ]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table of numbers: a line per setting, a column per mechanism."""
    mechanisms = list(dict.fromkeys(row["mechanism"] for row in rows))
    cells = {(row["setting"], row["mechanism"]): _cell(row) for row in rows}
    lines = [f"Numbers: {columns[0]} ± {columns[1]}.", ""]
    lines += [f"| | {' | '.join(mechanisms)} |", f"|{'---|' * (1 + len(mechanisms))}"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = (cells.get((setting, mechanism), "") for mechanism in mechanisms)
        lines.append(f"| {setting} | {' | '.join(own)} |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    mean, spread = row["mean"], row["spread"]
    text = "-" if mean is None else f"{mean:.4g}" if isinstance(mean, float) else str(mean)
    if spread is not None:
        text += f" ± {spread:.2g}" if isinstance(spread, float) else f" ({spread})"
    if row.get("diverged"):
        text += f", {row['diverged']} of {row['seeds']} diverged"
    return text
