"""Overview of a model, a row per layer and the graph it sees: for the command line and pictures."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.pattern import pattern_of
from graphattn.models.mixers import KINDS
from graphattn.models.proteins.protein_model import ProteinModel
from graphattn.nn.files.config import Configured


class LayerRow(NamedTuple):
    """Layers with the same kind of mixer over the same graph."""

    layers: tuple[int, ...]
    mixer: str
    graph: TokenGraph
    neighborhood: str | None = None

    @property
    def numbers(self) -> str:
        """Return the numbers of the layers, from 0, with ranges such as 0-3."""
        runs: list[list[int]] = []
        for number in self.layers:
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        return ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)

    @property
    def pattern(self) -> str:
        """Description of the tokens that each token sees."""
        return self.neighborhood or pattern_of(self.graph)


def layer_rows(
    model: nn.Module, graphs: Sequence[TokenGraph], *, each: bool = False, own: bool = False
) -> list[LayerRow]:
    """List the graphs of a model's layers.

    Args:
        model: a model with a list `blocks`, each with a `mixer`.
        graphs: one per block, in their order.
        each: whether every layer gets its own row, even if it is equal to others.
        own: whether the model has made the graphs, so that it can name their edges.
    """
    blocks: Any = model.blocks
    rows: list[LayerRow] = []
    for place, (block, graph) in enumerate(zip(blocks, graphs, strict=True)):
        mixer = mixer_name(block.mixer)
        for number, row in enumerate(rows):
            alike = row.mixer == mixer and _are_alike(row.graph, graph)
            if alike and not each:
                rows[number] = row._replace(layers=(*row.layers, place))
                break
        else:
            known = neighborhood(model) if own and graph.structure is None else None
            rows.append(LayerRow((place,), mixer, graph, known))
    return rows


def neighborhood(model: nn.Module) -> str | None:
    """Describe the edges that a protein model makes from a structure; None for other models."""
    if not isinstance(model, ProteinModel):
        return None
    parts = ((model.neighbors, "nearest"), (model.window, "along the chain"))
    return ", ".join(f"{number:,} {where}" for number, where in parts if number)


def _are_alike(graph: TokenGraph, other: TokenGraph) -> bool:
    """Return whether two graphs have the same edges, without listing them if possible."""
    if graph.structure is not None and other.structure is not None:
        return graph.structure == other.structure
    return graph is other or graph == other


def mixer_name(layer: nn.Module) -> str:
    """Return the name of a layer in `mixer`, or its class."""
    config: Any = layer.config if isinstance(layer, Configured) else {}
    names = [
        name
        for name, kind in KINDS.items()
        if type(layer) is kind.layer and all(config.get(key) == value for key, value in kind.fixed)
    ]
    # Use the most specific name of a class, but "dot" for "dot-window": the graph shows the window.
    return max(names, key=lambda name: len(KINDS[name].fixed), default=type(layer).__name__)


def takes_num_tokens(model: nn.Module) -> bool:
    """Return whether `model.graphs` needs a number of tokens; models of images do not."""
    graphs: Any = model.graphs
    return "num_tokens" in inspect.signature(graphs).parameters
