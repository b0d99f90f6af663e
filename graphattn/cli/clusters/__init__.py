"""`graphattn clusters`: iterate attention without weights over an image or a table."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

import graphattn as ga
from graphattn import dynamics
from graphattn.cli.clusters.sample import load_tokens
from graphattn.cli.clusters.tables import clusterings, score_table, step_table
from graphattn.cli.demo.sample import printable
from graphattn.cli.outputs import check_figures_can_be_drawn
from graphattn.dynamics.arguments import need_scikit_learn
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.plain_tables import cells_of, counted


def run_clusters(
    file: Path,
    *,
    pattern: str,
    scaling: str,
    steps: int,
    out: Path,
    console: Console,
    global_tokens: str | None = None,
    **of_tokens: Any,
) -> None:
    """Read, simulate, score and draw; `of_tokens` are the options of :func:`load_tokens`."""
    started = time.perf_counter()
    # Check for missing packages before the work.
    check_figures_can_be_drawn()
    need_scikit_learn()
    as_choice("--scaling", scaling, ("sdp", "sq", "sq_inplace"))
    as_int("--steps", steps, 1)
    tokens = load_tokens(file, **of_tokens)
    chosen = parse_pattern(
        pattern, len(tokens.x), is_image=tokens.image is not None, global_tokens=global_tokens
    )
    out.mkdir(parents=True, exist_ok=True)
    intro = [
        *tokens.notes,
        f"Pattern {chosen.name}: {chosen.meaning}.",
        f"Scaling {scaling}, features standardised, no weights (Attention Clusters, Eq. 1-3).",
    ]
    console.print(f"[bold]{escape(tokens.title)}[/bold]", highlight=False)
    for line in intro:
        console.print(line, highlight=False, markup=False)
    trajectory = dynamics.simulate(
        tokens.x,
        chosen.graph,
        steps=steps,
        scaling=scaling,  # type: ignore[arg-type]  # checked above
        progress=console.is_terminal,
    )
    with console.status("looking for clusters"):
        clusters = clusterings(tokens, trajectory)
        tables = [score_table(tokens, clusters, steps), step_table(trajectory)]
    for table in tables:
        console.print()
        console.print(table)
    with console.status("drawing"):
        from graphattn.cli.clusters.figures import draw
        from graphattn.cli.report import write_report

        report = write_report(
            out / "report.html",
            tokens.title,
            intro=" ".join(intro),
            figures=draw(tokens, clusters, trajectory, chosen.name),
            tables=[cells_of(table) for table in tables],
            facts={"pattern": chosen.name, "scaling": scaling, "steps": steps},
        )
    console.print(f"done in {time.perf_counter() - started:.1f} s", highlight=False)
    typer.echo(os.fsencode(report))  # byte for byte: a console would replace emoji codes and tabs


# The option `--pattern`: which tokens see which.


class Pattern(NamedTuple):
    """A graph, its name, and the meaning of the name."""

    name: str
    meaning: str
    graph: ga.TokenGraph


def parse_pattern(
    text: str, num_tokens: int, *, is_image: bool, global_tokens: str | None = None
) -> Pattern:
    """Make the graph of ``global``, ``block:128``, ``window:128`` or ``longformer:512``."""
    kind, _, size = text.partition(":")
    if global_tokens is not None and kind != "longformer":
        raise ValueError(
            "--global-tokens can only be used with --pattern longformer:SIZE, got --pattern "
            f"{text!r}"
        )
    if kind == "global" and not size:
        meaning = "every token sees every token"
        return Pattern(text, meaning, ga.complete_graph(num_tokens))
    least = {"block": 1, "window": 2, "longformer": 2}.get(kind)
    if least is None or not (size.isascii() and size.isdigit()) or int(size) < least:
        raise ValueError(
            "--pattern must be global, block:SIZE, window:SIZE or longformer:SIZE with SIZE in "
            f"tokens (2 or more; block: 1 or more), got {text!r}"
        )
    width = min(int(size), 2 * num_tokens)  # larger numbers give the same graph
    if kind == "block":
        meaning = (
            f"blocks of {counted(int(size), 'token')} that do not overlap, in the order of the file"
        )
        return Pattern(text, meaning, ga.block_window_graph(num_tokens, width))
    each_side = width // 2
    meaning = f"{counted(int(size) // 2, 'token')} on each side (a window of {size})"
    if kind == "window":
        graph = ga.window_path_graph(num_tokens, each_side, self_loops=True)
        return Pattern(text, meaning, graph)
    # The paper's choice: the middle pixel of an image, the first row of a table (Section 3.3).
    tokens = parse_tokens(global_tokens or ("middle" if is_image else "first"), num_tokens)
    if len(tokens) == 1:
        meaning += f", and token {tokens[0]} sees and is seen by all"
    else:
        meaning += f", and tokens {', '.join(map(str, tokens))} see and are seen by all"
    return Pattern(text, meaning, ga.longformer_graph(num_tokens, each_side, tokens))


def parse_tokens(text: str, num_tokens: int) -> list[int]:
    """Parse ``first,last`` or ``0,7,-1``; negative numbers count from the end."""
    words = {"first": 0, "middle": num_tokens // 2, "last": num_tokens - 1}
    tokens = set()
    for part in text.split(","):
        word = part.strip().lower()
        try:
            token = words[word] if word in words else int(word)
        except ValueError:
            token = num_tokens
        if not -num_tokens <= token < num_tokens:
            raise ValueError(
                f"--global-tokens must be numbers from {-num_tokens} to {num_tokens - 1}, or "
                f"first, middle, last, separated by commas, got {printable(text)!r}"
            )
        tokens.add(token % num_tokens)
    return sorted(tokens)
