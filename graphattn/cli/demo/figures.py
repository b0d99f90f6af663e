"""Figures of the demo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.demo.graphs import graphs_that_fit
from graphattn.cli.demo.pieces import NEAREST as NEAREST_IN_SPACE
from graphattn.cli.demo.sample import Sample
from graphattn.cli.demo.training import BESIDE, Training
from graphattn.cli.demo.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_TOKENS = 64  # tokens in the adjacency matrices
WINDOW, NEAREST, SHOWN_WINDOW = 8, 4, 28  # sizes for the figure of attention weights


@dataclass(frozen=True)
class Picture:
    """A figure in a file, with its title and caption."""

    path: Path
    title: str
    caption: str


def draw_pictures(
    sample: Sample, training: Training | None, folder: Path, seed: int
) -> list[Picture]:
    """Draw all figures into `folder`."""
    losses = folder / "losses.png"
    losses.unlink(missing_ok=True)  # from an older run, perhaps with another file
    pictures = [
        _graphs(sample, folder / "graphs.png"),
        _attention(sample, training, folder / "attention.png", seed),
        _filter(folder / "filter.png"),
    ]
    if training is not None:
        pictures.append(_losses(training, losses))
    return pictures


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=144)


def _graphs(sample: Sample, path: Path) -> Picture:
    """Draw the adjacency matrix of each graph."""
    few = replace(
        sample,
        tokens=sample.tokens[:SHOWN_TOKENS],
        packed=_first(sample.packed, SHOWN_TOKENS),
        ca_positions=None if sample.ca_positions is None else sample.ca_positions[:SHOWN_TOKENS],
    )
    graphs = graphs_that_fit(few)
    columns = 4
    rows = -(-len(graphs) // columns)
    figure = _figure(9.6, 2.6 * rows)
    for place, entry in enumerate(graphs):
        ax = figure.add_subplot(rows, columns, place + 1)
        ga.plot.adjacency(entry.graph, ax=ax)
        ax.set_title(entry.name, fontsize=9)
        ax.set(xlabel="", ylabel="")
    figure.savefig(path)
    return Picture(
        path,
        "The graphs as matrices",
        f"Each kind of graph of the table, built on {len(few.tokens)} tokens. Row i is what token "
        "i sees (blue); dark on the diagonal: it sees itself.",
    )


def _first(lengths: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Return how many tokens of every packed sequence are shown, at most `room` together."""
    each = room // max(len(lengths), 1)
    return tuple(min(length, each) for length in lengths)


@torch.no_grad()
def _attention(sample: Sample, training: Training | None, path: Path, seed: int) -> Picture:
    """Draw the weights of three mechanisms for the same queries and keys."""
    tokens = sample.tokens[:SHOWN_WINDOW]
    if training is not None:
        over = (
            f"the {NEAREST_IN_SPACE} nearest residues and {BESIDE} on each side along the chain"
            if training.in_space
            else "all tokens"
        )
        model, origin = (
            training.runs[0].model,
            f"the attention model's first layer (trained with dot products over {over}; the head "
            "whose weights vary most)",
        )
    else:
        torch.manual_seed(seed)
        model, origin = ga.models.SequenceEncoder(sample.vocab_size + 1, 64, 4, 4), "random weights"
    block: Any = model.blocks[0]
    if sample.ca_positions is None:
        graph = ga.window_path_graph(len(tokens), WINDOW, self_loops=True)
        where, sees = "in one window", f"every token sees {WINDOW} tokens on each side"
    else:
        graph = _neighbors_in_space(sample.ca_positions[: len(tokens)])
        where = "among neighbours in space"
        sees = (
            f"each of {len(tokens)} residues sees the {NEAREST_IN_SPACE} nearest residues, itself "
            "included"
        )
    x = block.mixer_norm(model.embedding(tokens))
    query, key, _ = block.mixer.project(x, x, graph, None)
    sigma = query.shape[-1] ** 0.5
    panels = {
        "dot product": ga.attention_weights(query, key, graph),
        "RBF, σ = √D": ga.attention_weights(query, key, graph, sigma=sigma),
        f"Krause: RBF, the {NEAREST} nearest": ga.attention_weights(
            query, key, graph, sigma=sigma, top_k=NEAREST
        ),
    }
    # Take the head whose dot-product weights vary most between tokens.
    head = int(panels["dot product"].var(0, correction=0).argmax())
    highest = max(float(weights[:, head].max()) for weights in panels.values())
    figure = _figure(9.6, 3.7)
    axes = figure.subplots(1, 3)
    for ax, (title, weights) in zip(axes, panels.items(), strict=True):
        labels = [shown(letter) for letter in sample.letters[: len(tokens)]]
        ga.plot.attention_weights(
            weights[:, head], graph, labels=labels, vmax=highest, colorbar=False, ax=ax
        )
        ax.set_title(title, fontsize=9)
    for ax in axes[1:]:
        ax.set_ylabel("")
    bar = figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.7, pad=0.01)
    bar.set_label("weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)
    return Picture(
        path,
        f"Attention weights {where}",
        f"Head {head} of {origin}: the same queries and keys under three mechanisms, {sees}. Row i "
        "shows the weights of token i; grey is no edge, white an edge of weight 0.",
    )


def _neighbors_in_space(ca_positions: Tensor) -> ga.TokenGraph:
    """Make the graph of residues with the nearest C-alpha atoms, with self-loops."""
    near = min(NEAREST_IN_SPACE - 1, len(ca_positions) - 1)
    if near < 1:
        return ga.complete_graph(len(ca_positions))
    return ga.knn_graph(ca_positions.double(), k=near + 1, self_loops=True)


def shown(letter: str) -> str:
    """Return a character as a tick label that exists in the font of the figures."""
    if letter == " ":
        return "␣"
    if letter == "\n":
        return "⏎"
    return letter if letter.isprintable() and ord(letter) < 0x250 else "·"


def _filter(path: Path) -> Picture:
    """Draw the low-pass filter of repeated consensus steps."""
    figure = _figure(9.6, 3.4)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, window in zip(axes, (2, 8), strict=True):
        ga.plot.filter_response(ga.window_path_graph(SHOWN_TOKENS, window), ax=ax)
        ax.set_title(f"path of {SHOWN_TOKENS} tokens, window {window}", fontsize=9)
    axes[1].set_ylabel("")
    figure.savefig(path)
    return Picture(
        path,
        "Consensus is a low-pass filter",
        "The factor of each mode after n steps with R = I and the largest step size η with which "
        "no mode changes sign, 1 / (2 λ_max); dots are the eigenvalues of the graph (consensus "
        "paper, Eq. 7 and 9).",
    )


def _losses(training: Training, path: Path) -> Picture:
    figure = _figure(9.6, 3.8)
    ax = figure.add_subplot()
    ga.plot.loss_curves(
        {run.name: run.losses for run in training.runs},
        reference={"guessing by frequency": training.choosing_frequency_loss},
        ax=ax,
    )
    ax.set_ylabel("loss (nats per guess)")
    figure.savefig(path)
    material = training.material
    if material.choosing:
        where = "tokens that are set aside to choose the weights"
    else:
        where = "held-out tokens" if material.is_held_out else "the training tokens"
    return Picture(
        path,
        "Loss in training",
        f"Masked-token modelling, on {where}; lower is better. {verdict(training)}",
    )
