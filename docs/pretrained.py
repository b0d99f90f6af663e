"""The recorded run of examples/pretrained_models.py, docs/integrations/pretrained.json, as tables.

Nothing is measured here: to record anew, run the example with ``--json`` and commit the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "integrations" / "pretrained.json"
NAMES = {"eager": "dot product, as it came", "dot": "dot product", "rbf": "RBF", "krause": "Krause"}


def read() -> dict[str, Any]:
    """The record."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def markdown() -> str:
    """Both tables, each with what it was measured on, and where the run comes from."""
    record = read()
    antibodies, sentences = record["antibodies"], record["sentences"]
    facts = antibodies["facts"]
    lines = [
        f"{facts['masked_residues']} residues of {facts['measured_on']} antibodies, masked one at "
        f"a time. Fine-tuned: {facts['steps']} steps of {facts['batch_size']} domains of "
        f"{facts['tuned_on']} other antibodies, learning rate up to {facts['learning_rate']:g}. "
        f"Guessing by frequency has a perplexity of {facts['by_frequency']:.1f}.",
        "",
        *table(
            ("attention", "edges kept", "perplexity", "of the first row's"),
            [
                (
                    name(row) + (", fine-tuned" if row["fine_tuned"] else ""),
                    f"{100 * row['edges']:.1f} %",
                    f"{row['perplexity']:.3f} ± {row['error']:.3f}",
                    f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}",
                )
                for row in antibodies["rows"]
            ],
        ),
        f"{sentences['facts']['sentences']} passages of {sentences['facts']['tokens']:.0f} tokens "
        "on average.",
        "",
        *table(
            ("attention", "edges kept", "cosine", "least"),
            [
                (
                    name(row),
                    f"{100 * row['edges']:.1f} %",
                    f"{row['cosine']:.3f} ± {row['error']:.3f}",
                    f"{row['least']:.3f}",
                )
                for row in sentences["rows"]
            ],
        ),
        "Recorded: " + ", ".join(f"{k} {v}" for k, v in record["provenance"].items()) + ".",
        "",
    ]
    return "\n".join(lines)


def name(row: dict[str, Any]) -> str:
    """The mixer and its limits."""
    limits = [
        f"{word} {row[key]}" for key, word in (("window", "window"), ("top_k", "top")) if row[key]
    ]
    return ", ".join([NAMES[row["mixer"]], *limits])


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterable[str]:
    """A Markdown table; numbers, from the second column on, flush right."""
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
    yield ""
