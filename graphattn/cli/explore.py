"""`graphattn explore`: write the page of the explorer for a kind of graph or for a protein."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import graphattn as ga
from graphattn.cli.embed import model_of, read_proteins
from graphattn.cli.graph import sizes_text
from graphattn.cli.graph.kinds import KINDS, build, sizes_of
from graphattn.cli.outputs import check_output
from graphattn.data import MAX_BYTES
from graphattn.near_names import did_you_mean

SLIDERS = ("window", "radius", "block_size")
VALUES = (1, 2, 4, 8, 16, 32, 64)  # of a slider, beside the one that is given


def run_explore(
    subject: str,
    out: Path,
    sizes: Mapping[str, Any],
    neighbors: int | None,
    model: Path | None,
    preset: str | None,
    chains: str | None,
    console: Console,
) -> None:
    """Write the page; its path is printed."""
    check_output("--out", out)
    of_files = {"--neighbors": neighbors, "--model": model, "--preset": preset, "--chains": chains}
    if subject in KINDS:
        _refuse(of_files, f"the kind {subject}", "a file")
        page = _explore_kind(subject, sizes_of(subject, sizes), out)
    elif Path(subject).exists():
        _refuse({f"--{name}": size for name, size in sizes.items()}, "a file", "a kind of graph")
        page = _explore_file(Path(subject), out, neighbors, model, preset, chains)
    else:
        near = did_you_mean(subject, KINDS)
        raise ValueError(
            f"SUBJECT must be a file or one of {', '.join(KINDS)}, got {subject!r}{near}"
        )
    console.print(str(page), highlight=False, markup=False, soft_wrap=True)


def _refuse(options: Mapping[str, Any], subject: str, other: str) -> None:
    for name, value in options.items():
        if value is not None:
            name = name.replace("_", "-")
            raise ValueError(f"{name} is an option of {other}, and not of {subject}: leave it out")


def _explore_kind(kind: str, sizes: dict[str, Any], out: Path) -> Path:
    graphs = {0: build(kind, sizes)}
    option = next((name for name in SLIDERS if name in sizes), None)
    title = f"{kind}: {sizes_text(sizes)}"
    if option is None:
        return ga.explore(graphs[0], out, positions=_grid(sizes), title=title)
    start = sizes[option]
    graphs = {start: graphs[0]}
    for value in VALUES:
        try:
            graphs[value] = build(kind, {**sizes, option: value})
        except ValueError:  # too large for so few tokens
            continue
    graphs = _different(graphs, start)
    name = option.replace("_", " ")
    return ga.explore(graphs, out, positions=_grid(sizes), option=name, start=start, title=title)


def _different(graphs: Mapping[int, ga.TokenGraph], start: int) -> dict[int, ga.TokenGraph]:
    """Leave out larger values that add no edges, as a window of more than all tokens."""
    found: dict[int, ga.TokenGraph] = {}
    for value in sorted(graphs):
        edges = graphs[value].num_edges
        if value == start or edges not in [graph.num_edges for graph in found.values()]:
            found[value] = graphs[value]
    return found


def _grid(sizes: Mapping[str, Any]) -> Tensor | None:
    """Return the places of an image or a volume; the class token stands beside the first one."""
    if "height" not in sizes:
        return None
    shape = [sizes[name] for name in ("depth", "height", "width") if name in sizes]
    places = torch.cartesian_prod(*(torch.arange(float(n)) for n in shape)).flip(1)
    if sizes.get("class_token"):
        places = torch.cat([torch.full((1, len(shape)), -1.5), places])
    return places


def _explore_file(
    file: Path,
    out: Path,
    neighbors: int | None,
    model: Path | None,
    preset: str | None,
    chains: str | None,
) -> Path:
    protein = read_proteins(file, chains, MAX_BYTES)[0]
    content, title = protein.content, protein.name[:60]
    has_model = model is not None or preset is not None
    if isinstance(content, str):
        if not has_model:
            raise ValueError(
                f"SUBJECT must be a structure or a kind of graph if no model is given, got {file} "
                "with letters only: add --model FOLDER or --preset NAME"
            )
        if neighbors is not None:
            raise ValueError("--neighbors needs a structure, got a FASTA file: leave it out")
    elif not has_model:
        return ga.explore(content, out, start=neighbors, title=title)
    network = model_of(model, preset, seed=0)
    if not isinstance(network, ga.models.ProteinModel):
        raise ValueError(
            f"--model must be a ProteinModel, got a {type(network).__name__}: in Python, use "
            "ga.explore(model, path, inputs=...)"
        )
    if isinstance(content, str):
        return ga.explore(network, out, inputs=content, labels=list(content), title=title)
    with torch.no_grad(), ga.diagnostics.record(network) as recording:
        network.logits(content)
    return ga.explore(content, out, recording=recording, start=neighbors, title=title)
