"""`graphattn models`: list the presets of models, and show what every layer sees."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

import graphattn as ga
from graphattn.graphs.arguments import as_choice
from graphattn.models.overview import layer_rows, neighborhood, takes_num_tokens
from graphattn.models.presets import preset as arguments_of
from graphattn.plain_tables import number_columns, plain_table

TOKENS = 512  # default length of a sequence


def run_models(name: str | None, tokens: int | None, console: Console) -> None:
    """Print the list of all presets, or the arguments and layers of one."""
    if name is None:
        if tokens is not None:
            raise ValueError("--tokens needs the name of a model: graphattn models NAME --tokens N")
        console.print(presets_table())
        return
    presets = ga.models.presets()
    preset = presets[as_choice("NAME", name, tuple(presets))]
    model = on_meta(name)
    graphs = graphs_of(name, model, tokens)
    title = f"{name}: {preset.model}, {model.num_parameters():,} parameters"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(preset.about, highlight=False, markup=False)
    console.print("A shape with random weights, not a trained model.", highlight=False)
    console.print()
    console.print(arguments_table(model, arguments_of(name, preset.model)))
    console.print(layers_table(model, graphs))
    if known := neighborhood(model):
        text = f"Shown without a structure. With one, each sees: {known}."
        console.print(text, highlight=False)


def on_meta(name: str) -> Any:
    """Make the model of a preset on the meta device, which is fast for every size."""
    preset = ga.models.presets()[name]
    with torch.device("meta"):
        return getattr(ga.models, preset.model).from_preset(name)


def graphs_of(name: str, model: Any, tokens: int | None) -> list[ga.TokenGraph]:
    if takes_num_tokens(model):
        return list(model.graphs(TOKENS if tokens is None else tokens))
    if tokens is not None:
        raise ValueError(
            f"--tokens can only be used with models of sequences, got {name}, whose image "
            "determines the number of tokens"
        )
    return list(model.graphs())


def presets_table() -> Table:
    table = plain_table("Presets of models, with random weights: ga.models.CLASS.from_preset(NAME)")
    table.add_column("NAME", no_wrap=True)
    number_columns(table, "parameters")
    table.add_column("what it is")
    presets = ga.models.presets()
    for model in dict.fromkeys(preset.model for preset in presets.values()):
        table.add_row(model, style="bold")
        for name, preset in presets.items():
            if preset.model == model:
                count = on_meta(name).num_parameters()
                table.add_row(f" {name}", f"{count:,}", escape(preset.about))
    table.caption = "graphattn models NAME shows the arguments and the layers of one."
    return table


def arguments_table(model: Any, given: dict[str, Any]) -> Table:
    """Make the table of the constructor's arguments; defaults come last."""
    table = plain_table("Arguments")
    table.add_column("argument", no_wrap=True)
    table.add_column("value")
    config = model.config
    others = [name for name in config if name not in given]
    for heading, names in (("of the preset", list(given)), ("defaults", others)):
        table.add_row(heading, style="bold")
        for name in names:
            table.add_row(f" {name}", escape(repr(config[name])))
    return table


def layers_table(model: nn.Module, graphs: list[ga.TokenGraph]) -> Table:
    table = plain_table("What every layer sees")
    table.add_column("layers", no_wrap=True)
    table.add_column("mixer", no_wrap=True)
    number_columns(table, "tokens")
    table.add_column("each sees")
    number_columns(table, "edges")
    for row in layer_rows(model, graphs):
        tokens = f"{row.graph.num_targets:,}"
        table.add_row(row.numbers, row.mixer, tokens, row.pattern, f"{row.graph.num_edges:,}")
    return table
