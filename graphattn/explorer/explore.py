"""The public function that writes the page of the explorer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.data import Structure
from graphattn.data.structures.principal_axes import rotated_to_principal_axes
from graphattn.diagnostics import Recording
from graphattn.dynamics import ParticleFlow, Trajectory
from graphattn.explorer.attention_data import (
    attention_data,
    joined,
    record_model,
    weights_of,
)
from graphattn.explorer.flow_data import flow_data
from graphattn.explorer.graph_data import graph_data
from graphattn.explorer.packing import packed
from graphattn.graphs import TokenGraph, from_edge_index
from graphattn.version import __version__

MOST_TOKENS = 5_000  # the page draws every token
MOST_BYTES = 3_000_000  # a page that mail and browsers still take
NEIGHBORS = (4, 8, 16, 32)  # of the residues of a structure: the values of the slider
BOND = 4.5  # Angstrom; consecutive C-alpha atoms are 3.8 apart, so a longer step is a gap

Subject = (
    TokenGraph | dict[int, TokenGraph] | nn.Module | Recording | Structure | ParticleFlow
    | Trajectory
)  # fmt: skip


def explore(
    subject: Subject,
    path: str | os.PathLike[str],
    *,
    inputs: Any = None,
    recording: Recording | None = None,
    positions: Tensor | None = None,
    labels: Sequence[str] | None = None,
    option: str = "option",
    start: int | None = None,
    title: str | None = None,
) -> Path:
    """Write one HTML page on which a graph, attention or moving clusters can be explored.

    The page needs no other file and no network, and has those parts for which there are data:

    - the graph as a matrix and as a drawing, with sources and targets of any token, its spectrum,
      and the layers after which information arrives;
    - for several graphs, a slider among them;
    - the weights of recorded attention, by layer and head;
    - for the result of :func:`graphattn.dynamics.krause_flow` or
      :func:`graphattn.dynamics.simulate`, the clusters over the steps.

    Args:
        subject: a graph; a dict of graphs of the same tokens, by the value of an option, for a
            slider; a model, which is run once on `inputs`; a recording of one
            (:func:`graphattn.diagnostics.record`); a :class:`~graphattn.data.Structure` (its
            nearest neighbours in space, with a slider); a flow or trajectory.
        path: where the page is written.
        inputs: for a model, what it is called with: a tensor, a tuple of arguments, a dict of
            keyword arguments, or a Structure for a :class:`~graphattn.models.ProteinModel`.
        recording: attention that is shown with a graph or a structure of the same tokens.
        positions: places of the tokens for the drawing, [N, 2] or [N, 3]; those of a structure are
            known.
        labels: N names of tokens; those of a structure are known.
        option: the name of the option whose values are the keys of a dict of graphs.
        start: the key that is shown first; the middle one if None.
        title: the heading of the page.

    Returns:
        The path.

    Raises:
        ValueError: if `subject` is of another type, has no tokens or too many, or its graphs do not
            have the same tokens; `inputs` are missing; the model has no attention that can be
            recorded; shapes do not fit; the page would have more than three megabytes; or `path`
            cannot be written.

    Example:
        >>> import tempfile, torch, graphattn as ga
        >>> folder = tempfile.mkdtemp()
        >>> graphs = {w: ga.window_path_graph(200, window=w) for w in (1, 2, 4, 8)}
        >>> page = ga.explore(graphs, folder + "/window.html", option="window")
        >>> model = ga.models.CausalLM(20, 32, depth=2, heads=4, window=16)
        >>> tokens = torch.randint(20, (1, 40))
        >>> page = ga.explore(model, folder + "/attention.html", inputs=tokens)
        >>> page.stat().st_size < 3_000_000
        True
    """
    path = _as_path(path)
    page = _Page(option, start)
    page.add(subject, inputs)
    if recording is not None:
        if not isinstance(recording, Recording):
            raise ValueError(f"recording must be a Recording, got {type(recording).__name__}")
        page.add_recording(recording)
    page.add_places(positions, labels)
    return page.write(path, title)


class _Page:
    """The parts of a page, as they are found."""

    def __init__(self, option: str, start: int | None) -> None:
        self.option, self.start = option, start
        self.graphs: dict[int, TokenGraph] = {}
        parts = ("calls", "flow", "positions", "dimensions", "bonds", "labels")
        self.data: dict[str, Any] = dict.fromkeys(parts)
        self.notes: list[str] = []
        self.num_tokens: int | None = None
        self.structure: Structure | None = None
        self.title = ""

    def add(self, subject: Any, inputs: Any) -> None:
        if inputs is not None and not isinstance(subject, nn.Module):
            raise ValueError(
                f"inputs must be None unless subject is a model, got a {type(subject).__name__} "
                "as subject: leave inputs out"
            )
        match subject:
            case TokenGraph():
                self.title = "A token graph"
                self.add_graphs({0: subject})
            case dict():
                self.title = "Token graphs"
                self.add_graphs(subject)
            case Structure():
                self.title = "A protein structure"
                self.add_structure(subject, with_graph=True)
            case nn.Module():
                self.title = f"Attention of {type(subject).__name__}"
                recording = record_model(subject, inputs)
                for given in _flat(inputs):
                    if isinstance(given, Structure):
                        self.add_structure(given, with_graph=False)
                self.add_recording(recording)
            case Recording():
                self.title = "Recorded attention"
                self.add_recording(subject)
            case ParticleFlow() | Trajectory():
                self.title = "Clusters of tokens over steps"
                self.check_tokens(subject.states.shape[1])
                self.data["flow"], notes = flow_data(subject)
                self.notes += notes
                if isinstance(subject, Trajectory):
                    self.add_graphs({0: subject.graph})
            case _:
                raise ValueError(
                    "subject must be a TokenGraph, a dict of graphs, a model, a Recording, a "
                    "Structure, or the result of krause_flow or simulate, got "
                    f"{type(subject).__name__}"
                )

    def check_tokens(self, num_tokens: int) -> None:
        if not 1 <= num_tokens <= MOST_TOKENS:
            raise ValueError(
                f"subject must have 1 to {MOST_TOKENS:,} tokens, because the page draws every one "
                f"of them, got {num_tokens:,}: take a part, for example a shorter sequence"
            )
        if self.num_tokens not in (None, num_tokens):
            raise ValueError(
                f"all parts must have the same tokens, got {self.num_tokens} and {num_tokens}"
            )
        self.num_tokens = num_tokens

    def add_graphs(self, graphs: Mapping[int, TokenGraph]) -> None:
        if not graphs:
            raise ValueError("subject must have at least one graph, got an empty dict")
        for key, graph in graphs.items():
            if not isinstance(graph, TokenGraph) or type(key) is not int:
                raise ValueError(
                    "subject must be a dict from integers to TokenGraphs, got "
                    f"{key!r}: {type(graph).__name__}"
                )
            if not graph.has_same_tokens:
                raise ValueError(
                    "subject must be a graph whose targets and sources are the same tokens, got "
                    f"{graph.num_targets} targets and {graph.num_sources} sources: look at its "
                    "weights with a recording, or draw it with ga.plot.adjacency"
                )
            self.check_tokens(graph.num_targets)
        if self.start is not None and self.start not in graphs:
            allowed = ", ".join(map(str, sorted(graphs)))
            raise ValueError(f"start must be one of the keys {allowed}, got {self.start!r}")
        self.graphs = dict(sorted(graphs.items()))

    def add_structure(self, structure: Structure, *, with_graph: bool) -> None:
        N = len(structure)
        self.check_tokens(N)
        self.structure = structure
        if with_graph:
            self.option = "neighbors"
            values = {k for k in NEIGHBORS if k < N} or {1}
            values |= {self.start} if self.start is not None else set()
            self.add_graphs({k: structure.neighbor_graph(k) for k in values})

    def add_recording(self, recording: Recording) -> None:
        calls, notes = weights_of(recording, self.num_tokens)
        self.check_tokens(calls[0].rows.rowptr.size - 1)
        if not self.graphs:
            rows, is_one = joined(calls)
            edges = torch.from_numpy(rows.source), torch.from_numpy(rows.target)
            self.add_graphs({0: from_edge_index(torch.stack(edges), self.num_tokens or 0)})
            if not is_one:
                notes.append("The graph has the edges of all layers together; they differ.")
        self.data["calls"], more = attention_data(calls)
        self.notes += notes + more

    def add_places(self, positions: Any, labels: Any) -> None:
        N, structure = self.num_tokens, self.structure
        if labels is not None:
            labels = [str(label) for label in labels]
            if len(labels) != N:
                raise ValueError(f"labels must have {N} names, one per token, got {len(labels)}")
        elif structure is not None:
            chains = structure.chain_index.tolist()
            many = len(structure.chain_ids) > 1
            numbers = structure.residue_numbers.tolist()
            labels = [
                f"{structure.chain_ids[chain]}:" * many + f"{letter}{number}{code}"
                for letter, chain, number, code in zip(
                    structure.sequence, chains, numbers, structure.insertion_codes, strict=True
                )
            ]
        if positions is None and structure is not None:
            positions = rotated_to_principal_axes(structure.ca_positions.detach().cpu().double())
            steps = (positions[1:] - positions[:-1]).norm(dim=1)
            joined_on = (steps <= BOND) & (structure.chain_index.diff() == 0)
            self.data["bonds"] = joined_on.int().tolist()
        if positions is not None:
            is_tensor = isinstance(positions, Tensor)
            if not is_tensor or positions.shape not in ((N, 2), (N, 3)):
                got = list(positions.shape) if is_tensor else type(positions).__name__
                raise ValueError(f"positions must be a tensor [{N}, 2] or [{N}, 3], got {got}")
            self.data["positions"] = packed(positions.detach().cpu().float().numpy(), "<f4")
            self.data["dimensions"] = positions.shape[1]
        self.data["labels"] = labels

    def write(self, path: Path, title: str | None) -> Path:
        keys = list(self.graphs)
        shown = keys.index(self.start) if self.start in keys else len(keys) // 2
        self.data |= {
            "num_tokens": self.num_tokens,
            "option": self.option if len(keys) > 1 else None,
            "values": keys,
            "shown": shown,
            "graphs": [graph_data(graph) for graph in self.graphs.values()],
        }
        html = _html(title or self.title, self.num_tokens or 0, self.notes, self.data)
        size = len(html.encode(errors="replace"))
        if size > MOST_BYTES:
            raise ValueError(
                f"subject must fit into a page of {MOST_BYTES:,} bytes, got {size:,}: take fewer "
                "tokens, fewer graphs, or graphs with fewer edges that are not windows"
            )
        try:
            path.write_text(html, encoding="utf-8", errors="replace")
        except OSError as error:
            raise ValueError(
                f"path must be a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from None
        return path


def _html(title: str, num_tokens: int, notes: list[str], data: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    def text(name: str) -> str:
        return files(__package__).joinpath(name).read_text(encoding="utf-8")

    # Inside a script, "</script" would end it, whatever the quotes around it are.
    as_json = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return page.from_string(text("page.html.jinja")).render(
        title=title,
        num_tokens=num_tokens,
        notes=notes,
        data=data,
        json=as_json.replace("<", "\\u003c"),
        style=text("explorer.css"),
        script=text("explorer.js"),
        version=__version__,
    )


def _flat(inputs: Any) -> list[Any]:
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def _as_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be the name of a file, got {type(path).__name__}")
    path = Path(path)
    is_folder = os.path.isdir(path)  # which says no to names that are too long; Path.is_dir raises
    if is_folder or not path.parent.is_dir():
        what = "it is a folder" if is_folder else f"there is no folder {path.parent}"
        raise ValueError(
            f"path must be a file in an existing folder, got {str(path)!r}, but {what}"
        )
    return path
