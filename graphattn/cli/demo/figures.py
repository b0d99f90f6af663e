"""Figures of the demo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.demo.graphs import graphs_that_fit
from graphattn.cli.demo.pieces import NEAREST as NEAREST_IN_SPACE
from graphattn.cli.demo.sample import Sample
from graphattn.cli.demo.training import BESIDE, Training
from graphattn.cli.demo.verdict import verdict
from graphattn.cli.report import Figure
from graphattn.plot.drawing.style import page_figure

SHOWN_TOKENS, MATRIX = 64, 1.7  # tokens in the adjacency matrices, and their size in inches
WINDOW, NEAREST, SHOWN_WINDOW = 8, 4, 22  # sizes for the figure of attention weights


def draw_figures(sample: Sample, training: Training | None, seed: int) -> list[Figure]:
    drawn = [_graphs(sample), _attention(sample, training, seed), _filter()]
    return drawn if training is None else [*drawn, _losses(training)]


def _graphs(sample: Sample) -> Figure:
    few = replace(
        sample,
        tokens=sample.tokens[:SHOWN_TOKENS],
        packed=_first(sample.packed, SHOWN_TOKENS),
        ca_positions=None if sample.ca_positions is None else sample.ca_positions[:SHOWN_TOKENS],
    )
    panels = {}
    for entry in graphs_that_fit(few):
        panels[entry.name] = page_figure(MATRIX, MATRIX)
        ax = ga.plot.adjacency(entry.graph, ax=panels[entry.name].add_subplot())
        ax.set(xlabel="", ylabel="")
    return Figure(
        "The graphs as matrices",
        f"Each kind of graph of the table, built on {len(few.tokens)} tokens. Row i is what token "
        "i sees (blue); dark on the diagonal: it sees itself.",
        panels,
    )


def _first(lengths: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Return how many tokens of every packed sequence are shown, at most `room` together."""
    each = room // max(len(lengths), 1)
    return tuple(min(length, each) for length in lengths)


@torch.no_grad()
def _attention(sample: Sample, training: Training | None, seed: int) -> Figure:
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
    query, key, _ = block.mixer.project(x, x, None)
    sigma = query.shape[-1] ** 0.5
    mechanisms = {
        "dot product": ga.attention_weights(query, key, graph),
        "RBF, σ = √D": ga.attention_weights(query, key, graph, sigma=sigma),
        f"Krause: RBF, the {NEAREST} nearest": ga.attention_weights(
            query, key, graph, sigma=sigma, top_k=NEAREST
        ),
    }
    # Take the head whose dot-product weights vary most between tokens.
    head = int(mechanisms["dot product"].var(0, correction=0).argmax())
    highest = max(float(weights[:, head].max()) for weights in mechanisms.values())
    labels = [shown(letter) for letter in sample.letters[: len(tokens)]]
    panels = {}
    for name, weights in mechanisms.items():
        panels[name] = page_figure(3.4)
        ax = panels[name].add_subplot()
        ga.plot.attention_weights(weights[:, head], graph, labels=labels, vmax=highest, ax=ax)
    return Figure(
        f"Attention weights {where}",
        f"Head {head} of {origin}: the same queries and keys under three mechanisms, {sees}. Row i "
        "shows the weights of token i; grey is no edge, white an edge of weight 0.",
        panels,
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


def _filter() -> Figure:
    panels = {}
    for window in (2, 8):
        figure = panels[f"path of {SHOWN_TOKENS} tokens, window {window}"] = page_figure(2.8)
        graph = ga.window_path_graph(SHOWN_TOKENS, window)
        ga.plot.filter_response(graph, ax=figure.add_subplot())
    return Figure(
        "Consensus is a low-pass filter",
        "The factor of each mode after n steps with R = I and the largest step size η with which "
        "no mode changes sign, 1 / (2 λ_max); dots are the eigenvalues of the graph (consensus "
        "paper, Eq. 7 and 9).",
        panels,
    )


def _losses(training: Training) -> Figure:
    figure = page_figure(2.8)
    ax = figure.add_subplot()
    ga.plot.loss_curves(
        {run.name: run.losses for run in training.runs},
        reference={"guessing by frequency": training.choosing_frequency_loss},
        ax=ax,
    )
    ax.set_ylabel("loss (nats per guess)")
    material = training.material
    if material.choosing:
        where = "tokens that are set aside to choose the weights"
    else:
        where = "held-out tokens" if material.is_held_out else "the training tokens"
    return Figure(
        "Loss in training",
        f"Masked-token modelling, on {where}; lower is better. {verdict(training)}",
        figure,
    )
