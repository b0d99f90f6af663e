"""`graphattn graph`: print facts about a token graph, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphattn.cli.graph.facts import MOST_EDGES, GraphFact, facts_of
from graphattn.cli.graph.kinds import KINDS, build, option, sizes_of
from graphattn.cli.outputs import check_figures_can_be_drawn, check_output, write_json
from graphattn.graphs.arguments import as_float
from graphattn.plain_tables import cells_of, number_columns, plain_table


def run_graph(
    kind: str | None,
    sizes: Mapping[str, Any],
    step_size: float | None,
    plot: Path | None,
    html: Path | None,
    json: Path | None,
    console: Console,
) -> None:
    """Print, draw and write the facts about one graph; without a kind, list the kinds."""
    if kind is None:
        console.print(kinds_table())
        return
    arguments = sizes_of(kind, sizes)
    if step_size is not None:
        step_size = as_float("--step-size", step_size, positive=True)
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    check_output("--html", html)
    check_output("--json", json)
    graph = build(kind, arguments)
    if plot is not None or html is not None:
        check_figures_can_be_drawn()  # before the work
        if graph.num_edges > MOST_EDGES or not graph.num_edges:
            raise ValueError(
                f"--plot and --html need a graph with 1 to {MOST_EDGES:,} edges, got "
                f"{graph.num_edges:,}: change the options of the graph, or leave out --plot and "
                "--html"
            )
    facts = facts_of(graph, KINDS[kind].theory(arguments), step_size)
    title = f"{kind}: {sizes_text(arguments)}"
    table = facts_table(facts)
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(table)
    if json is not None:
        as_lists = {
            n: list(size) if isinstance(size, range) else size for n, size in arguments.items()
        }
        values = {fact.key: fact.value for fact in facts}
        write_json(json, {"kind": kind, "sizes": as_lists, **values})
        console.print(str(json), highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        from graphattn.cli.graph.figures import overview

        overview(graph, title, step_size).savefig(plot)
        console.print(str(plot), highlight=False, markup=False, soft_wrap=True)
    if html is not None:
        from graphattn.cli.graph.figures import separate
        from graphattn.cli.report import write_report

        figures = separate(graph, step_size)
        intro = "A token graph: which tokens see which, and how fast information can spread."
        write_report(html, title, intro=intro, figures=figures, tables=[cells_of(table)])
        console.print(str(html), highlight=False, markup=False, soft_wrap=True)


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """Return the options for the same graph, such as ``--tokens 64 --window 2``."""
    words = []
    for name, value in sizes.items():
        if isinstance(value, bool):
            words.append(option(name) if value else option(name).replace("--", "--no-", 1))
        else:
            words.append(f"{option(name)} {len(value) if isinstance(value, range) else value}")
    return " ".join(words)


def facts_table(facts: list[GraphFact]) -> Table:
    table = plain_table("What is known of it")
    table.add_column("fact", no_wrap=True)
    number_columns(table, "value")
    table.add_column("  meaning")
    for fact in facts:
        table.add_row(fact.name, escape(fact.text), f"  {escape(fact.note)}")
    table.caption = (
        "Eigenvalues are those of the Laplacian of the symmetrised graph; steps are consensus "
        "steps with R = I. Remarks are the consensus paper's."
    )
    return table


def kinds_table() -> Table:
    table = plain_table(
        "graphattn graph KIND, with any of these options (the values shown are the defaults)"
    )
    table.add_column("KIND", no_wrap=True)
    table.add_column("options")
    for name, kind in KINDS.items():
        options = {n: range(v) if n == "global_tokens" else v for n, v in kind.options.items()}
        table.add_row(name, escape(sizes_text(options)))
    table.caption = "--global-tokens N makes the first N tokens global."
    return table
